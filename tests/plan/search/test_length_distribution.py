"""Distributions of lengths: parsed, drawn, cut at the context length, and mistakes explained."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.core.errors import ConfigError
from megascale.plan.search.length_distribution import KINDS, of_lengths, parse_lengths

TOKENS = 4_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_its_tokens_within_the_context(kind: str) -> None:
    lengths = parse_lengths(KINDS[kind].example, 100_000)
    step = lengths.step(np.random.default_rng(0), TOKENS)
    assert all(1 <= length <= 100_000 for length in step)
    assert TOKENS - 100_000 < sum(step) <= TOKENS
    assert step == lengths.step(np.random.default_rng(0), TOKENS)


def test_draws_have_the_parameters() -> None:
    step = parse_lengths("lognormal:median=2000,sigma=1.5", 10**6).step(np.random.default_rng(1), 2 * TOKENS)
    assert np.median(step) == pytest.approx(2000, rel=0.15)
    assert np.std(np.log(step)) == pytest.approx(1.5, rel=0.1)
    tail = parse_lengths("pareto:min=100,alpha=1", 10**6).step(np.random.default_rng(1), 2 * TOKENS)
    assert np.mean(np.array(tail) > 1000) == pytest.approx(0.1, abs=0.03)
    shares = parse_lengths("shares:1024=0.9,4096=0.08,65536=0.02", 10**6).step(np.random.default_rng(1), 2 * TOKENS)
    assert np.mean(np.array(shares) <= 1024) == pytest.approx(0.9, abs=0.02)
    assert max(shares) > 32_768


def test_a_dataset_s_documents_are_cut_at_the_context_length() -> None:
    drawn = set(of_lengths("corpus", [250, 30, 0], 100).step(np.random.default_rng(0), 10_000))
    assert drawn == {100, 50, 30}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lognorm:median=3", "there is no distribution 'lognorm'.*did you mean 'lognormal'"),
        ("lognormal:median=3", "the values of lognormal cannot be read.*lognormal:median=2000,sigma=1.8"),
        ("lognormal:median=x,sigma=2", "cannot be read"),
        ("pareto:min=0,alpha=1", "cannot be read"),
        ("shares:100=0.5,50=0.5", "cannot be read"),
        ("shares:nan=1", "cannot be read"),
        ("shares:inf=1", "cannot be read"),
        ("shares:100=0.5", "cannot be read"),
        ("fixed", "cannot be read"),
    ],
)
def test_mistakes_say_how_to_write_it(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_lengths(text, 1000)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="corpus has no documents"):
        of_lengths("corpus", [], 1000)
