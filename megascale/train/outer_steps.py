"""Training across sites: this job is one of several, which meet in outer steps (`optim.outer_optimizer`).

    steps      1 ... H   1 ... H   1 ... H            H = sites.every; a fragment of the layers has a phase of its own
    meeting          *         *         *            who is there (`comm.site_meetings`)
    exchange         --        --        --           rank r of a site with rank r of the others; in the background of
    outer step         *         *         *          `sites.overlap` steps

A site that is lost is left out. When it comes back, or if it was late, it takes over progress, outer weights and
momentum of another at the next meeting, with an inner optimizer from its own checkpoint.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.checkpoint.format.state import Progress
from megascale.comm.collectives import all_gather
from megascale.comm.group import Group
from megascale.comm.site_group import AXIS, open_site_group
from megascale.comm.site_meetings import Arrival, Members, SiteMeetings
from megascale.comm.work import COMPLETED, Work
from megascale.core.errors import LostPeerError
from megascale.operate.channel.secret import sites_secret
from megascale.operate.print_line import print_line
from megascale.optim.outer_optimizer import PseudoGradient
from megascale.record.layout import Phase
from megascale.record.recorder import Recorder
from megascale.train.resume import copy_masters_and_gather
from megascale.train.run import Hook, Run, StepResult

TRIES = 5  # meetings of one outer step, after failed exchanges

AGREED = ("model", "parallel", "batch", "train", "optimizer", "sites")
"""Sections that are equal at all sites, but for the place of each."""


@dataclass(frozen=True)
class SiteExchange:
    """An exchange between `members`, complete after the step `until`. `gathered` [members, bytes], u8."""

    members: Members
    own: PseudoGradient
    gathered: Tensor
    work: Work
    until: int


class Sites(Hook):
    """Takes this rank's part in the outer steps of its site, and says which sites take part.

    It begins with a meeting, at which it takes over the state of the sites that train: a collective of all ranks. The
    secret of all sites is in the environment.

    Raises: ConfigError if the sites differ, or without the secret; MegascaleError without a meeting point
    """

    def __init__(self, run: Run) -> None:
        assert run.outer is not None, "one of several sites has outer weights"
        config, outer, log, first = run.config, run.outer, run.mesh.recorder.log, run.mesh.rank == 0
        settings, self._settings, self._outer = config.sites, config.sites, outer
        self.say: Callable[[str], None] = print_line if first else lambda text: None
        self._group: Group | None = None
        self._met = -1  # the last meeting with an exchange
        self._known: tuple[int, ...] = ()
        self._exchange: SiteExchange | None = None
        self._bytes = 0  # exchanged since the last step
        log.set_phase(Phase.SITES)
        outer.begin()
        dumped = config.model_dump(mode="json", by_alias=True)
        agreement = {f"{name}.{key}": json.dumps(value) for name in AGREED for key, value in dumped[name].items()}
        agreement.pop("sites.index")
        self.say(f"site {settings.index} meets the others at {settings.address} (`megascale sites`)")
        self._meetings = SiteMeetings(
            settings, sites_secret(), datetime.timedelta(seconds=config.launch.start_timeout_s),
            ranks=run.mesh.world.size, first=first, agreement=agreement, advance=log.advance,
        )  # fmt: skip
        self._meetings.number = run.mesh.world.control.broadcast(self._meetings.number, "the open meeting of sites")
        self._meet(run, ())

    def step_ends(self, run: Run, result: StepResult) -> None:
        """Complete the exchange whose time has come, and begin the next. A collective of all ranks of all sites."""
        step, last, ending = run.progress.step, run.config.train.steps, self._exchange
        if ending is not None and step < min(ending.until, last):
            ending = None
        if (fragments := self._settings.due(step, last)) or ending:
            recorder, start = run.mesh.recorder, time.perf_counter()
            with recorder.activity(Phase.SITES):
                if ending and not self._complete(run):
                    self._meet(run, ending.own.fragments)
                if fragments:
                    self._meet(run, fragments, 0 if step == last else self._settings.overlap)
            recorder.count_traffic(AXIS, self._bytes, time.perf_counter() - start)
            self._bytes = 0

    def _meet(self, run: Run, fragments: Sequence[int], overlap: int = 0) -> None:
        """Meet until an outer step of `fragments` is taken, or begun in the background of `overlap` steps."""
        run.buffers.finish_param_gather()
        for _ in range(TRIES):
            progress = run.progress
            members = self._meetings.attend(
                Arrival(self._settings.index, progress.step, progress.samples, progress.tokens, tuple(fragments))
            )
            self._note_members(members)
            if self._begin(run, members, overlap):
                return
        raise LostPeerError(f"{TRIES} exchanges between sites have failed, of {members.sites} the last", peers=[])

    def _begin(self, run: Run, members: Members, overlap: int) -> bool:
        """Begin the exchange of a meeting; complete it without a background, and if a site returns. Return False if it
        failed.
        """
        place = members.sites.index(self._settings.index)
        returning, source = members.returning, members.arrivals[members.source]
        if not members.trained and not returning:
            return True
        own, state = self._outer.pseudo_gradient(source.fragments), None
        gathered: Tensor = own.payload[None]
        work: Work = COMPLETED
        try:
            if len(members.arrivals) > 1:
                group = self._open(run, members, place)
                if returning:
                    states, done = _gather(group, self._outer.taken_over(), "state")
                    done.wait()
                    self._bytes += states.nbytes
                    state = states[members.source] if place in returning else None
                gathered, work = _gather(group, own.payload, "pseudo-gradients")
                self._bytes += gathered.nbytes
        except RuntimeError:
            return self._fails(members)
        self._exchange = SiteExchange(members, own, gathered, work, run.progress.step + overlap)
        return (overlap > 0 and not returning) or self._complete(run, state)

    def _complete(self, run: Run, state: Tensor | None = None) -> bool:
        """Wait for the exchange, and take the outer step if all sites can. Return False if it failed: nothing has
        changed then. `state`: of another site, which this one takes over.
        """
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, "an exchange was begun"
        members, own = exchange.members, exchange.own
        try:
            exchange.work.wait()
        except RuntimeError:
            return self._fails(members)
        if len(members.arrivals) > 1 and not self._meetings.is_taken(members, succeeded=True):
            return self._fails(members)
        if state is not None:
            source = members.arrivals[members.source]
            run.progress = Progress(source.step, source.samples, source.tokens)
            self._outer.take_over(state.to(own.payload.device))
            own = self._outer.pseudo_gradient(source.fragments)
        if members.trained:
            payloads = [exchange.gathered[at].to(own.payload.device) for at in members.trained]
            place = members.sites.index(self._settings.index)
            self._outer.step(own, payloads, contributed=place in members.trained)
        if run.fp8_state is not None:
            run.fp8_state.invalidate_weights()
        copy_masters_and_gather(run)
        return True

    def _open(self, run: Run, members: Members, place: int) -> Group:
        """Return the group of `members`: that of the last exchange, if the same processes have met."""
        begun = any(not arrival.fragments for arrival in members.arrivals)
        if self._group is None or self._group.ranks != members.sites or self._met != members.number - 1 or begun:
            recorder = run.mesh.recorder if run.mesh.recorder.timer.synchronous else Recorder()
            store, host = self._meetings.store, self._settings.place[0]
            times = self._settings.grace_s, run.config.comm.timeout_s
            self._group = open_site_group(members, place, run.mesh.rank, store, host, recorder, *times)
        self._met = members.number
        return self._group

    def _fails(self, members: Members) -> bool:
        """Give the exchange up at all sites. Returns False."""
        self._group = None
        self._meetings.is_taken(members, succeeded=False)
        self.say(f"WARNING: the exchange of sites {members.sites} failed, and is tried again")
        return False

    def _note_members(self, members: Members) -> None:
        if members.sites != self._known:
            missing = sorted(set(range(self._settings.count)) - set(members.sites))
            self.say(
                f"{'WARNING: ' if missing else ''}{len(members.sites)} of {self._settings.count} sites train"
                + (f", without {', '.join(map(str, missing))}" if missing else "")
            )
        self._known = members.sites


def _gather(group: Group, part: Tensor, label: str) -> tuple[Tensor, Work]:
    """Start to gather `part` [bytes], u8, of every site into [sites, bytes] on the host."""
    out = torch.empty(group.size, part.numel(), dtype=torch.uint8)
    if not part.numel():
        return out, COMPLETED
    return out, all_gather(group, out.view(-1), part.cpu(), label=label, wait=False)
