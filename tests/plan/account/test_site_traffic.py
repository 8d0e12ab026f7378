"""What a plan says of a training across sites: the memory of outer state, and bytes between sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.plan.account.site_traffic import describe_sites
from megascale.plan.account.state_bytes import state_bytes
from tests.runs import GPT, LLAMA, config_of, settings
from tests.thread_world import run_threads

SITES = {"sites__count": 2, "sites__address": "10.0.0.5:7100"}


@pytest.mark.parametrize("sites", [SITES, SITES | {"sites__top_k": 0.1}, SITES | {"sites__bits": 8}])
def test_outer_state_is_counted_as_optimizer_state(sites: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(settings(LLAMA, tmp_path, parallel__dp=2, parallel__pp=2, **sites), tmp_path)

    def held(run: Any) -> int:
        return sum(values.nbytes for part in (run.optimizer, run.outer) for values in part.flat_tensors())

    weights = [sum(s.master.nbytes for s in run) for run in run_threads(config, lambda run: run.optimizer.shards)]
    for rank, (size, own) in enumerate(zip(run_threads(config, held), weights, strict=True)):
        assert size - own == state_bytes(config, rank // 2).optimizer  # in fp64 the weights are their own masters


def described(folder: Path, **changes: Any) -> str:
    config = config_of(settings(GPT, folder, **changes), folder)
    return describe_sites(config.sites, config.model, config.train)


def test_one_site_sends_nothing(tmp_path: Path) -> None:
    assert described(tmp_path) == ""


def test_a_plan_says_what_sites_send(tmp_path: Path) -> None:
    keys = SITES | {"train__precision": "fp32", "sites__every": 50}
    assert described(tmp_path, **keys).endswith("1/50 of the gradients")
    sparse = described(tmp_path, **keys, sites__top_k=64 / 4096, sites__bits=2)
    assert "1/6,82" in sparse, "50 steps x 4,096 x 32 bits, by 64 x (2 + 12) bits and two levels"
