"""The layouts that a number of devices allows: every way to set the keys of `VARIED` that passes the rules.

What divides is enumerated; what else decides is asked of `config.rules`, axis by axis, for a rule relates few keys.
`Space.legal` asks all of them of one configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from megascale.catalog.schedules import SCHEDULES
from megascale.config.rules import RULES, around, divisors, world_findings
from megascale.config.run import RunConfig


class Layout(NamedTuple):
    """A value for each key of `VARIED`."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    schedule: str = "1f1b"
    dp: int = 1
    micro: int = 1
    recompute: str = "none"
    zero: int = 1

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a configuration that say so."""
        return dict(zip(VARIED, self, strict=True))


SECTIONS = {"micro": "batch", "recompute": "train"}
VARIED = tuple(f"{SECTIONS.get(name, 'parallel')}.{name}" for name in Layout._fields)
"""The keys that differ between layouts, in the order of the fields of `Layout`."""

SUITED = ("parallel.layers_per_chunk", "train.recompute_ops", "train.recompute_chunks")
"""The keys that a layout drops where they do not suit it."""


@dataclass(frozen=True)
class Space:
    """The layouts of a resolved `config` on `devices`; the keys that `fixed` names stay as they are.

    A key that changes nothing stays too: sp without tp, zero without dp. Those that may not suit a layout, how layers
    are cut into chunks and what of a chunk is computed again, stay where they do. `coarse`: as many chunks only as
    divide a rank's layers, and micro-batches at least twice as large as the next smaller.
    """

    config: RunConfig
    devices: int
    fixed: frozenset[str]
    coarse: bool = False

    def layouts(self, tps: Collection[int], *, lean: bool = False) -> Iterator[Layout]:
        """All legal ones, with these tp only and of each the first of its `zeros`; always in the same order. `lean`: of
        those that differ in micro-batches and in what is computed again alone, the one that keeps least.
        """
        total, cp = self.config.batch.total, self.config.parallel.cp
        pipelines = self._leanest if lean else self._pipelines
        for (tp, sp), (pp, vpp, schedule, recompute) in itertools.product(self._tensors(tps), pipelines):
            dp, left = divmod(self.devices, tp * cp * pp)
            if left or total % dp or dp not in self._values("parallel.dp", [dp]):
                continue
            micros = [micro for micro in self._micros if total // dp % micro == 0]
            for micro in micros[:1] if lean else micros:
                yield Layout(tp, sp, pp, vpp, schedule, dp, micro, recompute, self.zeros(dp)[0])

    @property
    def piles(self) -> bool:
        """Whether all micro-batches go forward before one goes back: only if that is given."""
        name = self.config.parallel.schedule
        return "parallel.schedule" in self.fixed and name is not None and bool(SCHEDULES[name].facts["piles"])

    def zeros(self, dp: int) -> list[int]:
        """What may be sharded over dp."""
        return self._values("parallel.zero", (0, 1, 2) if dp > 1 else (self.config.parallel.zero,))

    def applied(self, layout: Layout) -> RunConfig:
        """The configuration with this layout, resolved."""
        return _applied(self.config, layout, self.fixed)

    def legal(self, config: RunConfig) -> bool:
        """Whether all rules that read a key of `VARIED` pass, for so many devices."""
        return _passes(config) and not any(world_findings(config, self.devices))

    def others(self) -> list[int]:
        """Other numbers of devices that could be tp x cp x pp x dp, with the batch divided by dp: the nearest first."""
        tps = self._values("parallel.tp", divisors(self.config.model.num_heads))
        pps = self._values("parallel.pp", range(1, self._most + 1))
        groups = {tp * self.config.parallel.cp * pp for tp in tps for pp in pps}
        dps = self._values("parallel.dp", divisors(self.config.batch.total))
        counts = {group * dp for group in groups for dp in around(dps, self.devices / group)} - {self.devices}
        return sorted(counts, key=lambda count: (abs(count - self.devices), count))

    @property
    def _most(self) -> int:
        """Stages, with a layer in each, or as many chunks as there are given."""
        return max(self.config.model.num_layers, len(self.config.parallel.layers_per_chunk or ()))

    def _values(self, key: str, free: Iterable[Any]) -> list[Any]:
        return [_value(self.config, key)] if key in self.fixed else list(free)

    @property
    def _alone(self) -> Layout:
        """One device, beside which an axis is judged."""
        return Layout(micro=self.config.batch.micro, zero=self.config.parallel.zero)

    def _tensors(self, tps: Collection[int]) -> list[tuple[int, bool]]:
        found = []
        for tp in self._values("parallel.tp", tps):
            for sp in self._values("parallel.sp", (False, True) if tp > 1 else (self.config.parallel.sp,)):
                if _passes(_applied(self.config, self._alone._replace(tp=tp, sp=sp))):
                    found.append((tp, sp))
        return found

    @cached_property
    def _micros(self) -> list[int]:
        found = self._values("batch.micro", divisors(self.config.batch.total))
        if self.coarse:
            found = list(_apart(found))
        return [micro for micro in found if _passes(_applied(self.config, self._alone._replace(micro=micro)))]

    @cached_property
    def _pipelines(self) -> list[tuple[int, int, str, str]]:
        """Stages, chunks, the schedule and what is computed again."""
        most, found = self._most, []
        for pp in self._values("parallel.pp", divisors(self.devices, most)):
            for vpp in self._values("parallel.vpp", divisors(most // pp) if self.coarse else range(1, most // pp + 1)):
                for schedule, recompute in itertools.product(self._schedules(pp, vpp), self._recomputes):
                    layout = self._alone._replace(pp=pp, vpp=vpp, schedule=schedule, recompute=recompute)
                    if _passes(self.applied(layout)):
                        found.append((pp, vpp, schedule, recompute))
        return found

    @cached_property
    def _leanest(self) -> list[tuple[int, int, str, str]]:
        """Those of them that compute most again."""
        found = {pipeline[:-1]: pipeline for pipeline in self._pipelines}
        return list(found.values())

    @property
    def _recomputes(self) -> list[str]:
        """The more is computed again, the later."""
        return self._values("train.recompute", ("none", "selective", "full"))

    def _schedules(self, pp: int, vpp: int) -> list[str]:
        """Of one chunk a rank those that are for one: others do the same then. None that piles micro-batches up: it
        takes as long as one that does not, and more memory.
        """
        facts = {card.name: card.facts for card in SCHEDULES.cards.values()}
        suit = [name for name in facts if facts[name]["chunks"] == (vpp > 1) and not facts[name]["piles"]]
        return self._values("parallel.schedule", suit[:1] if pp == 1 else suit)


def _apart(sizes: Iterable[int]) -> Iterator[int]:
    """Of ascending sizes those that are at least twice the last."""
    last = 0
    for size in sizes:
        if size >= 2 * last:
            yield size
            last = size


def dropped(config: RunConfig, applied: RunConfig) -> list[str]:
    """The keys that `applied` no longer sets."""
    return [key for key in SUITED if _value(config, key) is not None and _value(applied, key) is None]


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _applied(config: RunConfig, layout: Layout, fixed: Collection[str] = ()) -> RunConfig:
    p, t = config.parallel, config.train
    parallel = dict(zip(Layout._fields, layout, strict=True))
    batch, train = {"micro": parallel.pop("micro")}, {"recompute": parallel.pop("recompute")}
    chunks = layout.recompute != "none" and max(t.recompute_chunks or [0]) < layout.vpp
    cut = len(p.layers_per_chunk or ()) == layout.pp * layout.vpp
    changed, suit = (parallel, train, train), (cut, layout.recompute == "selective", chunks)
    for key, changes, suits in zip(SUITED, changed, suit, strict=True):
        if not suits and key not in fixed:
            changes[key.partition(".")[2]] = None
    return config.model_copy(
        update={
            "parallel": p.model_copy(update=parallel),
            "batch": config.batch.model_copy(update=batch),
            "train": t.model_copy(update=train),
        }
    )


def _passes(config: RunConfig) -> bool:
    sections = {key.partition(".")[0] for key in VARIED}
    return not any(any(rule(config)) for reads, rule in RULES if sections.intersection(reads))
