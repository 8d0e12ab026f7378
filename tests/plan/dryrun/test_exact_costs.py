"""The stage with the highest peak is found without a dry run of every stage."""

from __future__ import annotations

from typing import Any

from tests.runs import GPT, config_of, settings


def test_the_fullest_stage_is_dry_run(tmp_path: Any) -> None:
    from megascale.plan.dryrun.dry_run import dry_run
    from megascale.plan.dryrun.exact_costs import exact_costs

    size = {"model__num_layers": 8, "model__seq_length": 128, "model__hidden_size": 256, "model__vocab_size": 2048}
    tree = settings(GPT, tmp_path, parallel__pp=4, train__precision="bf16", **size)
    config = config_of(tree, tmp_path)
    peaks = [dry_run(config, rank).peak.total() for rank in range(4)]
    exact = exact_costs(config, peaks)
    assert exact["memory_bytes"]["total"] == max(peaks) == peaks[exact["fullest_stage"]]
    assert len(exact["exact_stages"]) < 4
    without_order = exact_costs(config, [max(peaks)] * 4)  # any stage could be the fullest
    assert without_order["exact_stages"] == [0, 1, 2, 3] and without_order["memory_bytes_by_stage"] == peaks
