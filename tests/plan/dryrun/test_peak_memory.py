"""The stage with the highest peak is found without a dry run of every stage."""

from __future__ import annotations

from typing import Any

from tests.runs import GPT, config_of, settings


def test_the_fullest_stage_is_dry_run(tmp_path: Any) -> None:
    from megascale.plan.dryrun.dry_run import dry_run
    from megascale.plan.dryrun.peak_memory import peak_memory_stages

    size = {"model__num_layers": 8, "model__seq_length": 128, "model__hidden_size": 256, "model__vocab_size": 2048}
    tree = settings(GPT, tmp_path, parallel__pp=4, train__precision="bf16", **size)
    config = config_of(tree, tmp_path)
    peaks = [dry_run(config, rank).peak.total() for rank in range(4)]
    runs = list(peak_memory_stages(config, peaks))
    assert runs[0].peak.total() == max(peaks)
    assert len(runs) < 4
    runs_without_order = list(peak_memory_stages(config, [max(peaks)] * 4))  # any stage could be the fullest
    assert sorted(run.coord.pp for run in runs_without_order) == [0, 1, 2, 3]
