"""Meetings of sites: who takes part, who takes over whose state, and that all take an outer step or none."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest

from megascale.comm import site_meetings
from megascale.comm.site_meetings import Arrival, Members, SiteMeetings, may_close
from megascale.config.sites import SitesConfig
from megascale.core.errors import ConfigError, MegascaleError
from megascale.core.network import LOOPBACK, listen
from megascale.operate.channel.secret import SECRET_VARIABLE, job_secret
from tests.site_jobs import SECRET, meeting_point

KEY = job_secret(None, {SECRET_VARIABLE: SECRET})
TIMEOUT = datetime.timedelta(seconds=60)


def arrival(site: int, step: int, *fragments: int) -> Arrival:
    return Arrival(site, step, 8 * step, 100 * step, fragments)


@pytest.fixture
def address() -> Iterator[str]:
    with meeting_point() as found:
        yield found


def site(address: str, index: int, count: int = 2, grace_s: float = 60.0, ranks: int = 1, **facts: str) -> SiteMeetings:
    settings = SitesConfig(count=count, index=index, address=address, grace_s=grace_s)
    return SiteMeetings(settings, KEY, TIMEOUT, ranks=ranks, first=True, agreement=facts)


def begun(address: str, count: int = 2, **keys: Any) -> list[SiteMeetings]:
    """Return sites that have begun together."""
    sites = [site(address, index, count, **keys) for index in range(count)]
    meet(sites, 0)
    return sites


def together(*actions: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(actions)) as threads:
        return [each.result() for each in [threads.submit(action) for action in actions]]


def meet(sites: Sequence[SiteMeetings], step: int, *fragments: int) -> Members:
    """Let all sites arrive, ready for an outer step of `fragments` after `step`; return what they all see."""
    actions = (partial(at.attend, arrival(index, step, *fragments)) for index, at in enumerate(sites))
    first, *others = together(*actions)
    assert isinstance(first, Members) and all(members == first for members in others)
    return first


@pytest.mark.parametrize(("ready", "late", "over"), product([False, True], repeat=3))
def test_when_a_site_may_close_a_meeting(ready: bool, late: bool, over: bool) -> None:
    def closes(present: set[int], alive: set[int]) -> bool:
        return may_close(present, alive, 3, ready=ready, late=late, over=over)

    assert closes({0, 1, 2}, {0, 1, 2}) and closes({0, 1, 2}, {0})
    assert closes({0, 1}, {0, 1, 2}) == (ready and over and not late)  # the third may still train
    assert closes({0, 1}, {0, 1}) == (ready or over)  # the third is lost, or has not begun


def test_sites_behind_take_over_the_state_of_one_that_is_ahead() -> None:
    members = Members(7, (arrival(0, 30, 0), arrival(1, 40, 0), arrival(2, 40, 0), arrival(3, 40), arrival(4, 10)))
    assert members.trained == [1, 2] and members.source == 1 and members.returning == [0, 3, 4]


def test_sites_that_begin_together_exchange_nothing() -> None:
    assert Members(0, (arrival(0, 0), arrival(1, 0))).returning == []
    after_a_power_cut = Members(0, (arrival(0, 20), arrival(1, 40), arrival(2, 40)))
    assert after_a_power_cut.trained == [] and after_a_power_cut.returning == [0] and after_a_power_cut.source == 1


def test_sites_meet_one_meeting_after_another(address: str) -> None:
    sites = begun(address, 3)
    for number in range(1, 4):
        members = meet(sites, number, 0)
        assert members == Members(number, tuple(arrival(index, number, 0) for index in range(3)))
        assert together(*(partial(at.is_taken, members, succeeded=True) for at in sites)) == [True] * 3


def test_one_failure_keeps_all_ranks_from_the_outer_step(address: str) -> None:
    sites = begun(address)
    members = meet(sites, 5, 0)
    verdicts = together(
        lambda: sites[0].is_taken(members, succeeded=True), lambda: sites[1].is_taken(members, succeeded=False)
    )
    assert verdicts == [False, False]


def test_the_step_waits_for_every_rank_of_every_site(address: str) -> None:
    """Two ranks a site, of which one of the second site never has what it needs."""
    sites = begun(address, ranks=2)
    members = meet(sites, 5, 0)
    assert (
        together(
            *[lambda: sites[0].is_taken(members, succeeded=True)] * 2,
            lambda: sites[1].is_taken(members, succeeded=True),
            lambda: sites[1].is_taken(members, succeeded=False),
        )
        == [False] * 4
    )


def test_a_lost_site_is_left_out_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the grace is over: its beats have ended."""
    sites = begun(address, grace_s=1e6)
    meet(sites, 5, 0)
    monkeypatch.setattr(site_meetings, "LOST_S", 0.5)
    sites[1]._beats._look = threading.Event().wait  # it beats no more
    assert sites[0].attend(arrival(0, 6, 0)).sites == (0,)


def test_a_member_that_dies_in_an_exchange_fails_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = begun(address)
    members = meet(sites, 5, 0)
    monkeypatch.setattr(site_meetings, "LOST_S", 0.5)
    sites[1]._beats._look = threading.Event().wait  # it beats no more
    assert not sites[0].is_taken(members, succeeded=True)


def test_a_site_that_is_slow_is_left_out_after_the_grace_and_comes_to_the_next_meeting(address: str) -> None:
    early, slow = begun(address)
    patient = early._settings
    early._settings = patient.model_copy(update={"grace_s": 0.1})
    assert early.attend(arrival(0, 10, 0)).sites == (0,)
    early._settings = patient
    met = together(partial(slow.attend, arrival(1, 10, 0)), partial(early.attend, arrival(0, 15, 0)))
    assert met[0] == met[1]
    members = met[0]
    assert isinstance(members, Members) and members.trained == [0] and members.returning == [1]


def test_only_a_site_that_begins_waits_for_others_without_a_bound(address: str) -> None:
    """Its driver sees progress as long as they train. One that comes to an outer step goes on after the grace."""
    (trains, away), progress = begun(address, grace_s=1e6), list[float]()
    away._beats._look = threading.Event().wait  # type: ignore[union-attr]  # lost
    settings = SitesConfig(count=2, index=1, address=address)
    begins = SiteMeetings(
        settings, KEY, TIMEOUT, ranks=1, first=True, agreement={}, advance=lambda: progress.append(time.monotonic())
    )
    trains._advance = lambda: progress.append(0.0)
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(begins.attend, arrival(1, 0))
        while len(progress) < 10:
            time.sleep(0.01)
        assert not waits.done()
        met = threads.submit(trains.attend, arrival(0, 5, 0)).result()
        assert waits.result() == met and met.returning == [1]
    assert progress.count(0.0) == 2, "an arrival, and the end of the meeting"


def test_sites_that_differ_are_told_what(address: str) -> None:
    site(address, 0, model="2", batch="4")
    with pytest.raises(ConfigError, match="site 1  model: 3 differs from the first site's 2"):
        site(address, 1, model="3", batch="4")


def test_another_secret_is_no_site(address: str) -> None:
    settings = SitesConfig(count=2, address=address)
    with pytest.raises(ConfigError, match="the same MEGASCALE_JOB_SECRET"):
        SiteMeetings(settings, b"x" * 32, TIMEOUT, ranks=1, first=True, agreement={})


def test_no_meeting_point_is_said() -> None:
    with listen(LOOPBACK) as listener:
        address = f"{LOOPBACK}:{listener.getsockname()[1]}"
    with pytest.raises(MegascaleError, match=f"no answer from the meeting point of the sites at {address}"):
        settings = SitesConfig(count=2, address=address)
        SiteMeetings(settings, KEY, datetime.timedelta(seconds=0.2), ranks=1, first=True, agreement={})
