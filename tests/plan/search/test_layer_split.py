"""Layers are split over stages so that no other split has a faster slowest stage."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.loading import load_config_tree
from megascale.plan.search.layer_split import balanced
from megascale.plan.search.search import search
from megascale.plan.simulate import profiles
from tests.runs import LLAMA
from tests.runs import settings as settings_of


def slowest(seconds: list[float], first: float, last: float, sizes: list[int]) -> float:
    ends = list(itertools.accumulate(sizes, initial=0))
    taken = [sum(seconds[a:b]) for a, b in itertools.pairwise(ends)]
    taken[0] += first
    taken[-1] += last
    return max(taken)


@given(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=4, max_size=7), st.floats(0, 3), st.floats(0, 9))
@settings(max_examples=60, deadline=None)
def test_no_split_has_a_faster_slowest_stage(seconds: list[float], first: float, last: float) -> None:
    for stages in (1, 2, 4):
        splits = itertools.product(range(len(seconds) + 1), repeat=stages)
        legal = [list(sizes) for sizes in splits if sum(sizes) == len(seconds) and 0 not in sizes[1:-1]]
        found = balanced(seconds, first, last, stages)
        assert found in legal
        assert slowest(seconds, first, last, found) == pytest.approx(
            min(slowest(seconds, first, last, sizes) for sizes in legal)
        )


def test_layers_that_take_as_long_are_spread() -> None:
    assert balanced([1.0] * 9, 0.0, 0.0, 4) in ([2, 2, 2, 3], [3, 2, 2, 2])
    assert balanced([1.0] * 10, 0.0, 2.0, 4) == [3, 3, 3, 1]


def test_a_search_gives_the_stage_with_a_large_head_fewer_layers(tmp_path: Path) -> None:
    model = LLAMA | {
        "num_layers": 16, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8, "ffn_size": 8192,
        "vocab_size": 256_000, "seq_length": 4096,
    }  # fmt: skip
    keys = {"parallel__pp": 4, "batch__global": 64, "train__precision": "bf16"}
    config = load_config_tree(settings_of(model, tmp_path, **keys), "test").resolve(4)
    fixed = ["parallel.pp", "parallel.tp", "parallel.vpp", "batch.micro"]
    h100, stack = profiles.hardware("h100"), profiles.stack("megascale")
    first, *_ = search(config, 4, h100, stack, fixed, results=1).best
    sizes = first.config.parallel.layers_per_chunk
    assert sizes and sizes[-1] < min(sizes[:-1]) and sum(sizes) == 16
    even = search(config, 4, h100, stack, [*fixed, "parallel.layers_per_chunk"], results=1).best[0]
    assert first.estimate.step_s < 0.99 * even.estimate.step_s
