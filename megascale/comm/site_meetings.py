"""Meetings of sites: who takes part in an outer step. Sites meet in a store that none of them keeps, but `megascale
sites`.

A meeting has a number, and these keys:

    NUMBER/present    arrivals of sites, one a line, appended by the first rank of each
    NUMBER/members    those of them with whom the meeting was closed, written once by whoever closes it first
    NUMBER/done       ranks that have all they need
    NUMBER/verdict    written once: "taken" by the last of those ranks, or "failed" by a rank that misses something

A site closes a meeting when no live site is missing, or after `sites.grace_s`. One that begins, or has missed a
meeting, waits for the others however long they train. A site lives while its beats arrive. All ranks of a site read the
same answers, and need no message of their own.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass

from torch.distributed import DistNetworkError, DistStoreError

from megascale.comm.store import JobStore
from megascale.config.sites import SitesConfig
from megascale.core.errors import ConfigError, MegascaleError, Problem
from megascale.operate.channel.handshake import NotAPeerError

BEAT_S, LOST_S = 1.0, 6.0  # seconds between a site's beats, and without one until it is lost
POLL_S = 0.05  # seconds between looks at a meeting that is open
WAIT_S = 1.0  # seconds of a request that waits
NEXT = "meeting"  # key of the number of the open meeting


@dataclass(frozen=True)
class Arrival:
    """A site at a meeting. `step`, `samples`, `tokens`: its progress. `fragments`: whose outer step it is ready for,
    none if it begins.
    """

    site: int
    step: int
    samples: int
    tokens: float
    fragments: tuple[int, ...] = ()


@dataclass(frozen=True)
class Members:
    """The sites of a meeting, in their order."""

    number: int
    arrivals: tuple[Arrival, ...]

    @property
    def sites(self) -> tuple[int, ...]:
        return tuple(arrival.site for arrival in self.arrivals)

    @property
    def newest(self) -> int:
        return max(arrival.step for arrival in self.arrivals)

    @property
    def trained(self) -> list[int]:
        """Places of the sites whose pseudo-gradients count: those that have come as far as any, and do not begin."""
        return [at for at, arrival in enumerate(self.arrivals) if arrival.fragments and arrival.step == self.newest]

    @property
    def source(self) -> int:
        """Place of the site whose state others take over."""
        return next(iter(self.trained), [arrival.step for arrival in self.arrivals].index(self.newest))

    @property
    def returning(self) -> list[int]:
        """Places of the sites that take over the state of another: those that begin beside others that train, and
        those behind.
        """
        trained, newest = self.trained, self.newest
        behind = (at for at, arrival in enumerate(self.arrivals) if trained or arrival.step < newest)
        return [at for at in behind if at not in trained]


def may_close(present: Set[int], alive: Set[int], count: int, *, ready: bool, late: bool, over: bool) -> bool:
    """Return True if a site may close a meeting with those `present`, of `count` sites. `ready`: for an outer step, not
    to begin; `late`: it has missed the last meeting; `over`: it has waited for `sites.grace_s`.
    """
    if len(present) == count:
        return True
    if alive - present:
        return over and ready and not late
    return over or ready


class Beats(threading.Thread):
    """The thread of a site's first rank that tells the other sites that it lives, and sees who does."""

    def __init__(self, settings: SitesConfig, store: JobStore) -> None:
        super().__init__(name="beats of sites", daemon=True)
        self._settings, self._store = settings, store
        self._seen: Mapping[int, tuple[int, float]] = {}
        self._met: Mapping[int, float] = {}
        self._look()
        self.start()

    def run(self) -> None:
        with contextlib.suppress(DistNetworkError):  # the meetings say so
            while True:
                time.sleep(BEAT_S)
                self._look()

    def meet(self, sites: Sequence[int]) -> None:
        """Note that these sites have just met."""
        self._met = {**self._met, **dict.fromkeys(sites, time.monotonic())}

    def alive(self) -> set[int]:
        """The sites that have beaten, or met this one, lately."""
        signs = [*((site, moved) for site, (_, moved) in self._seen.items()), *self._met.items()]
        return {site for site, moved in signs if time.monotonic() - moved < LOST_S}

    def _look(self) -> None:
        own, now, seen = self._settings.index, time.monotonic(), dict(self._seen)
        for site in range(self._settings.count):
            count = self._store.add(f"beats/{site}", int(site == own))
            if count and (site not in seen or seen[site][0] != count):
                seen[site] = count, now
        self._seen = seen


class SiteMeetings:
    """A rank's part in the meetings. `ranks`: of each site. `first`: this is the first rank of its site. `agreement`:
    what sites have in common, by key. `advance`: called at an arrival and at the end of a meeting, and all along the
    wait of a site that begins or is late, for others that train: their drivers see whether they hang.

    Raises: ConfigError if the sites differ, or have another secret; MegascaleError if no meeting point answers
    """

    def __init__(
        self, settings: SitesConfig, secret: bytes, timeout: datetime.timedelta, *, ranks: int, first: bool,
        agreement: Mapping[str, str], advance: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._settings, self._ranks, self._advance = settings, ranks, advance
        self.number = 0
        with self._asking():
            self.store = JobStore(settings.place, secret, timeout)
            self._beats = Beats(settings, JobStore(settings.place, secret, timeout)) if first else None
            if first:
                self.number = int(self.store.compare_set(NEXT, "", "0"))
                self._agree(agreement)

    def attend(self, arrival: Arrival) -> Members:
        """Come to the open meeting, and return who takes part; this site does. Blocks until the meeting is closed."""
        with self._asking():
            while True:
                self._advance()
                number = self.number
                if self._beats is not None:
                    self._close_in_time(number, arrival, self._beats)
                members = Members(number, _arrivals(self._wait(f"{number}/members")))
                self.number += 1
                self.store.compare_set(NEXT, str(number), str(self.number))
                if arrival in members.arrivals:
                    self._advance()
                    if self._beats is not None:
                        self._beats.meet(members.sites)
                    return members

    def is_taken(self, members: Members, *, succeeded: bool) -> bool:
        """Say whether this rank has all that it needs for the outer step; return True if all ranks of all members have.
        Then, and only then, every rank takes the step.
        """
        verdict = f"{members.number}/verdict"
        with self._asking():
            if not succeeded:
                self.store.compare_set(verdict, "", "failed")
            elif self.store.add(f"{members.number}/done", 1) == self._ranks * len(members.arrivals):
                self.store.compare_set(verdict, "", "taken")
            return self._wait(verdict, members.sites) == "taken"

    def _close_in_time(self, number: int, arrival: Arrival, beats: Beats) -> None:
        """Arrive, and close the meeting when it is time, unless another site has."""
        store, settings, begun = self.store, self._settings, time.monotonic()
        store.append(f"{number}/present", json.dumps(asdict(arrival)) + "\n")
        before = _arrivals(store.get(key).decode()) if store.check([key := f"{number - 1}/members"]) else ()
        missed = before and arrival.site not in {other.site for other in before}
        is_late = bool(missed) and arrival.step <= max(other.step for other in before)
        while not store.check([f"{number}/members"]):
            text = store.get(f"{number}/present").decode()
            present = {other.site for other in _arrivals(text)}
            is_over = time.monotonic() - begun >= settings.grace_s
            if may_close(
                present, beats.alive(), settings.count, ready=bool(arrival.fragments), late=is_late, over=is_over
            ):
                store.compare_set(f"{number}/members", "", text)
                return
            if is_late or not arrival.fragments:
                self._advance()
            time.sleep(POLL_S)

    def _wait(self, key: str, members: Sequence[int] = ()) -> str:
        """Return the value of a key once it is there; of a verdict "failed" if a member is lost."""
        while True:
            with contextlib.suppress(DistStoreError):
                self.store.wait([key], datetime.timedelta(seconds=WAIT_S))
                return self.store.get(key).decode()
            if self._beats is not None and members and not self._beats.alive().issuperset(members):
                self.store.compare_set(key, "", "failed")

    def _agree(self, agreement: Mapping[str, str]) -> None:
        """Check that this site is as the first that came. Raises: ConfigError"""
        theirs = json.loads(self.store.compare_set("agreement", "", json.dumps(agreement)))
        hint = "the same at all sites; after a change at all of them, serve the meeting point anew"
        where = f"site {self._settings.index}"
        problems = [
            Problem(where, key, f"{value} differs from the first site's {theirs.get(key)}", hint)
            for key, value in agreement.items()
            if theirs.get(key) != value
        ]
        if problems:
            raise ConfigError(problems)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except NotAPeerError as error:
            hint = "the same MEGASCALE_JOB_SECRET at every site and at the meeting point"
            raise ConfigError([Problem("the meeting point", "sites.address", str(error), hint)]) from None
        except (OSError, DistNetworkError) as error:
            what = f"no answer from the meeting point of the sites at {self._settings.address}: {error}"
            hint = "see whether `megascale sites` runs there, and start this job again"
            raise MegascaleError(what, hint=hint) from None


def _arrivals(text: str) -> tuple[Arrival, ...]:
    """Return the sites' latest arrivals, by site."""
    lines = [json.loads(line) for line in text.splitlines()]
    latest = {fields["site"]: Arrival(**fields | {"fragments": tuple(fields["fragments"])}) for fields in lines}
    return tuple(latest[site] for site in sorted(latest))
