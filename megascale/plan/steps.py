"""Steps of many layouts of one configuration: how long each takes, at least and replayed, and why. What layouts share
is found once.
"""

from __future__ import annotations

from functools import lru_cache, partial

from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.layout.chunks import packed, stages_of
from megascale.plan.estimate import Estimate, Known, Model, Place, estimate, reduces_each, step_time
from megascale.plan.least import least_time
from megascale.plan.profiles import Hardware, Stack
from megascale.plan.steady import Repeating
from megascale.plan.wavefronts import Program, program
from megascale.schedule.runs import runs_of

RECENT = 16
"""Schedules that are kept: neighbours in the search often have the same."""


class Steps:
    """Times on some hardware with some stack, of resolved configurations that differ in their layouts alone."""

    def __init__(self, hardware: Hardware, stack: Stack) -> None:
        self._hardware, self._stack = hardware, stack
        self._numbers: dict[tuple[object, ...], list[int]] = {}
        self._program = lru_cache(RECENT)(_program)

    def least_s(self, config: RunConfig) -> float:
        """Seconds that a step takes at least, whatever the order of its actions."""
        p, model = config.parallel, Model(config, self._hardware, self._stack, self.known(config))
        each, count = reduces_each(config, self._stack), config.micro_batches
        return model.seconds(least_time(model.times(), p.pp, p.vpp, count, model.hides, reduce_each=each))

    def step_s(self, config: RunConfig) -> float:
        """Seconds of a step."""
        return step_time(config, self._hardware, self._stack, self.known(config))

    def estimate(self, config: RunConfig) -> Estimate:
        """All of a step, but that its replay may have no spans."""
        return estimate(config, self._hardware, self._stack, self.known(config))

    def known(self, config: RunConfig) -> Known:
        """What of a step no efficiency changes."""
        p, each = config.parallel, reduces_each(config, self._stack)
        assert p.schedule is not None, "a resolved configuration names its schedule"
        return Repeating(
            self._buckets(config), partial(self._program, p.schedule, p.pp, p.vpp, config.micro_batches, each)
        )

    def _buckets(self, config: RunConfig) -> dict[Place, list[int]]:
        """Numbers in them: chunks with as many layers have the same, but for the ends of the network."""
        p, layout, shards = config.parallel, stages_of(config), config.dp * config.parallel.cp
        found = {}
        for rank in range(p.pp):
            for chunk in range(p.vpp):
                index = layout.index(rank, chunk)
                alike = p.tp, shards, len(layout.layers(index)), index == 0, index == layout.count - 1
                if alike not in self._numbers:
                    self._numbers[alike] = [bucket.numbers for bucket in packed(config, rank)[chunk]]
                found[rank, chunk] = self._numbers[alike]
        return found


def _program(name: str, p: int, v: int, m: int, reduces_each: bool) -> Program:
    card = SCHEDULES[name]
    made, facts = partial(runs_of, card.load(), p, v), card.facts
    repeats = facts.get("repeats", False)
    return program(made, p, v, m, piles=facts["piles"], repeats=repeats, reduces_each=reduces_each)
