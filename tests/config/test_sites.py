"""The section `[sites]`: when outer steps are due, and values that follow others."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.config.run_warnings import run_warnings
from megascale.config.sites import SitesConfig
from tests.runs import GPT, config_of, settings

SEVERAL = {"sites__count": 3, "sites__address": "[fd00::5]:7100", "sites__index": 2}


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (10, 1), (10, 3), (12, 12)])
def test_every_fragment_is_due_once_in_every_steps(every: int, fragments: int) -> None:
    settings = SitesConfig(every=every, fragments=fragments)
    for start in (every, 5 * every):
        due = [fragment for step in range(start, start + every) for fragment in settings.due(step, 10**6)]
        assert sorted(due) == [*range(fragments)]


def test_all_fragments_are_due_after_the_last_step_and_none_before_the_first() -> None:
    settings = SitesConfig(every=10, fragments=3)
    assert settings.due(17, 17) == [0, 1, 2] and settings.due(0, 17) == []


def test_error_feedback_takes_the_place_of_momentum() -> None:
    dense, sparse = SitesConfig(count=2), SitesConfig(count=2, top_k=0.1)
    assert (dense.outer_lr, dense.outer_momentum, dense.state_tensors) == (0.7, 0.9, 2)
    assert (sparse.outer_lr, sparse.outer_momentum, sparse.state_tensors) == (1.0, 0.0, 2)
    assert SitesConfig().state_tensors == 0


def test_the_meeting_points_address(tmp_path: Path) -> None:
    assert config_of(settings(GPT, tmp_path, **SEVERAL), tmp_path).sites.place == ("fd00::5", 7100)


def test_a_step_consumes_the_samples_of_all_sites(tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, batch__rampup=[4, 4, 16], **SEVERAL), tmp_path)
    alone = config_of(settings(GPT, tmp_path, batch__rampup=[4, 4, 16]), tmp_path)
    assert config.samples == 3 * alone.samples
    consumed, by_one = 0, 0
    for _ in range(10):
        assert config.step_samples.at(consumed) == 3 * alone.step_samples.at(by_one)
        consumed, by_one = consumed + config.step_samples.at(consumed), by_one + alone.step_samples.at(by_one)


def test_keys_that_wait_for_a_second_site_are_warned_of(tmp_path: Path) -> None:
    (warning,) = run_warnings(config_of(settings(GPT, tmp_path, sites__every=50), tmp_path))
    assert "sites.every has no effect with one site" in warning


def test_a_run_without_an_outer_step_but_the_last_is_warned_of(tmp_path: Path) -> None:
    def warnings(every: int) -> list[str]:
        config = config_of(settings(GPT, tmp_path, sites__every=every, train__steps=50, **SEVERAL), tmp_path)
        return [text for text in run_warnings(config) if "sites.every" in text]

    assert warnings(50) == []
    (warning,) = warnings(51)
    assert warning.endswith(
        "every = 51 is more than train.steps: the only outer step follows the last one  -> at most 50"
    )


def test_a_share_of_less_than_one_element_is_refused() -> None:
    assert SitesConfig(count=2, top_k=1 / 4096).top_k * 4096 == 1
    with pytest.raises(ValueError, match=r"greater than or equal to 0\.000244140625"):
        SitesConfig(count=2, top_k=0.0002)
