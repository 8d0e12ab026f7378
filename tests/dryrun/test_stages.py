"""The fullest stage is found without dry-running every one."""

from __future__ import annotations

from typing import Any

from tests.runs import GPT, config_of, settings


def test_the_fullest_stage_is_among_those_that_are_run(tmp_path: Any) -> None:
    from megascale.dryrun.run import dry_run
    from megascale.dryrun.stages import fullest_stages

    size = {"model__num_layers": 8, "model__seq_length": 128, "model__hidden_size": 256, "model__vocab_size": 2048}
    tree = settings(GPT, tmp_path, parallel__pp=4, train__precision="bf16", **size)
    config = config_of(tree, tmp_path)
    all_of_them = [dry_run(config, rank).peak.total() for rank in range(4)]
    found = list(fullest_stages(config, all_of_them))
    assert found[0].peak.total() == max(all_of_them)
    assert len(found) < 4
    misled = list(fullest_stages(config, [max(all_of_them)] * 4))  # all could be
    assert sorted(run.coord.pp for run in misled) == [0, 1, 2, 3]
