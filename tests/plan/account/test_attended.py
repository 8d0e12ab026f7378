"""Scores within documents: counted as for each document alone, in estimates as in dry runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.cli.check_summary import summary
from megascale.config.run import RunConfig
from megascale.plan.account.attended import (
    count_scores_in,
    describe_documents,
    expected_documents,
    expected_scores,
    scores_per_token,
)
from megascale.plan.account.flops import hardware_flops, token_flops
from megascale.plan.account.memory import JobMemory
from megascale.plan.simulate.profiles import hardware, stack
from megascale.plan.simulate.step_time import StepParts
from tests.marks import only_quick_rows
from tests.plan.account.executed_flops import rank_flops
from tests.runs import GPT, LLAMA, config_of, settings

SIZES = {"hidden_size": 256, "num_heads": 8, "seq_length": 700, "vocab_size": 512}
SPARSE = {"local_blocks": 2, "stride": 4, "block": 16}
WITHIN = {"data__attention_mask": "document", "data__document_length": 150}


def configure(model: dict[str, Any], folder: Path, **keys: Any) -> RunConfig:
    return config_of(settings(model | SIZES, folder, **keys), folder)


@given(st.lists(st.integers(1, 60), min_size=1), st.one_of(st.none(), st.integers(1, 60)))
def test_scores_are_those_of_each_document(lengths: list[int], window: int | None) -> None:
    """A causal mask leaves query i min(i + 1, window) keys, of which half of the diagonal is not counted."""
    full, causal = count_scores_in(lengths, window)
    keys = [min(length, window or length) for length in lengths]
    assert full == sum(length * width for length, width in zip(lengths, keys, strict=True))
    exact = sum(min(i + 1, width) for length, width in zip(lengths, keys, strict=True) for i in range(length))
    assert causal == exact - sum(keys) / 2


@pytest.mark.parametrize("window", [None, [100, 0]])
def test_a_row_of_documents_has_the_flops_of_each(window: Any, tmp_path: Path) -> None:
    model = configure(LLAMA | {"window": window or 0}, tmp_path).model
    lengths = [300, 1, 99, 300]
    each = [(n, token_flops(model.model_copy(update={"seq_length": n}))) for n in lengths]
    packed = token_flops(model, scores_per_token(model, lengths))
    assert packed.full * 700 == pytest.approx(sum(n * flops.full for n, flops in each), rel=1e-12)
    assert packed.causal * 700 == pytest.approx(sum(n * flops.causal for n, flops in each), rel=1e-12)
    assert packed.linear == token_flops(model).linear and packed.full < token_flops(model).full


def test_sparse_layers_count_by_their_density(tmp_path: Path) -> None:
    """In both conventions, of a row and of each of its documents."""
    dense, sparse = (configure(LLAMA | keys, tmp_path).model for keys in ({}, {"sparse_attention": SPARSE}))
    pattern, lengths = sparse.sparse_pattern, [300, 1, 99, 300]
    assert pattern is not None
    for row in ([700], lengths):
        both = [token_flops(model, scores_per_token(model, row)) for model in (dense, sparse)]
        for at, convention in enumerate(("full_attention", "causal_attention")):
            share = sum(pattern.count_scores(n)[at] for n in row) / sum(count_scores_in([n], None)[at] for n in row)
            found, of_dense = (getattr(flops, convention) for flops in reversed(both))
            assert found == pytest.approx(of_dense * share, rel=1e-12)
    assert both[0].linear == both[1].linear


def test_without_an_expected_length_whole_rows_are_the_upper_bound(tmp_path: Path) -> None:
    plain, open_ended = configure(GPT, tmp_path), configure(GPT, tmp_path, data__attention_mask="document")
    assert expected_documents(plain.model, plain.data) == expected_documents(open_ended.model, open_ended.data) == [700]
    assert expected_scores(plain.model, plain.data) == scores_per_token(plain.model)
    within = configure(GPT, tmp_path, **WITHIN)
    assert expected_documents(within.model, within.data) == [150, 150, 150, 150, 100]
    assert describe_documents(plain.data) == "" and "upper bound" in describe_documents(open_ended.data)
    assert "documents of 150 tokens" in summary(configure(GPT, tmp_path, **WITHIN))


ATTENTION = {"causal": {}, "window": {"window": [100, 0]}, "sparse": {"sparse_attention": SPARSE}}


@pytest.mark.parametrize(
    ("attention", "recompute"),
    only_quick_rows(
        itertools.product(ATTENTION, ("none", "selective")),
        ("causal", "none"), ("causal", "selective"), ("window", "none"), ("sparse", "none"),
    ),
)  # fmt: skip
def test_flops_equal_a_dry_run_with_documents(attention: str, recompute: str, tmp_path: Path) -> None:
    from megascale.plan.dryrun.dry_run import dry_run

    model = LLAMA | ATTENTION[attention] if ATTENTION[attention] else GPT
    keys = {"parallel__tp": 2, "parallel__pp": 2, "train__precision": "bf16", "train__recompute": recompute}
    keys["batch__global"] = 2
    config = configure(model, tmp_path, **keys, **WITHIN)
    dry = dry_run(config, 3)
    assert rank_flops(config, dry.coord.pp) == dry.flops.total()
    assert rank_flops(config, 1) < rank_flops(configure(model, tmp_path, **keys), 1)
    assert JobMemory(config).rank(1).total == pytest.approx(dry.peak.total(), rel=0.06)


def test_estimates_follow_the_documents(tmp_path: Path) -> None:
    """A simulated step is shorter by the attention that it leaves out, which is no utilisation either."""
    long = {"model__seq_length": 16384, "train__precision": "bf16"}
    plain = config_of(settings(LLAMA | SIZES, tmp_path, **long), tmp_path)
    within = config_of(settings(LLAMA | SIZES, tmp_path, **long, **WITHIN), tmp_path)
    estimates = [StepParts(config, hardware("h100"), stack("megascale")).estimate for config in (plain, within)]
    assert estimates[1].step_s < estimates[0].step_s
    shares = [found.mfu_full * found.step_s for found in estimates]
    flops = [token_flops(config.model, expected_scores(config.model, config.data)).full for config in (plain, within)]
    assert shares[1] / shares[0] == pytest.approx(flops[1] / flops[0], rel=1e-9)
    assert hardware_flops(within).full == flops[1]
