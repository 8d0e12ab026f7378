"""The layouts that a number of devices allows: every way to set the keys of `VARIED` that passes the rules.

Divisors are enumerated; the rest is asked of `config.rules`, axis by axis, for a rule relates few keys. `Space.legal`
asks all of them of one configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from megascale.catalog.schedules import SCHEDULES
from megascale.config.rules import RULES, divisors, world_findings
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


SECTIONS = {"micro": "batch", "recompute": "train"}
VARIED = tuple(f"{SECTIONS.get(name, 'parallel')}.{name}" for name in Layout._fields)
"""The keys that differ between layouts, in the order of the fields of `Layout`."""

SUITED = ("parallel.layers_per_chunk", "train.recompute_ops", "train.recompute_chunks")
"""The keys that a layout drops where they do not suit it."""

RECOMPUTE = ("none", "selective", "full")
"""Values of train.recompute, from the least to the most."""


@dataclass(frozen=True)
class Space:
    """The layouts of a resolved `config` on `devices`; the keys that `fixed` names stay as they are.

    A key that changes nothing stays too: sp without tp, zero without dp. `SUITED` keys stay where they suit a layout.
    """

    config: RunConfig
    devices: int
    fixed: frozenset[str] = frozenset()

    def layouts(self, tps: Collection[int], *, lean: bool = False) -> Iterator[Layout]:
        """All legal layouts with these tp, in a fixed order. `lean`: only the smallest micro-batch and the most
        recomputation, which need least memory.
        """
        total, pipelines = self.config.batch.total, self._pipelines
        if lean:  # of each pp, vpp and schedule the last, which recomputes most
            pipelines = list({pipeline[:-1]: pipeline for pipeline in pipelines}.values())
        for (tp, sp), (pp, vpp, schedule, recompute) in itertools.product(self._tensors(tps), pipelines):
            dp, left = divmod(self.devices, tp * pp)
            if left or total % dp or dp not in self._values("parallel.dp", [dp]):
                continue
            micros = [micro for micro in self._micros if total // dp % micro == 0]
            for micro in micros[:1] if lean else micros:
                for zero in self._values("parallel.zero", (0, 1, 2) if dp > 1 else (self.config.parallel.zero,)):
                    yield Layout(tp, sp, pp, vpp, schedule, dp, micro, recompute, zero)

    def applied(self, layout: Layout) -> RunConfig:
        """The configuration with this layout, resolved."""
        return _applied(self.config, layout, self.fixed)

    def legal(self, config: RunConfig) -> bool:
        """Ask all rules that read a key of `VARIED`, on these devices."""
        return _passes(config) and not any(world_findings(config, self.devices))

    def others(self) -> list[int]:
        """List other numbers of devices that could be tp x pp x dp, with the batch divided by dp: the nearest first."""
        tps = self._values("parallel.tp", divisors(self.config.model.num_heads))
        pps = self._values("parallel.pp", range(1, self._most + 1))
        dps = self._values("parallel.dp", divisors(self.config.batch.total))
        counts = {tp * pp * dp for tp, pp, dp in itertools.product(tps, pps, dps)} - {self.devices}
        return sorted(counts, key=lambda count: (abs(count - self.devices), count))

    @property
    def _most(self) -> int:
        """Chunks, with a layer in each but the first and the last, or as many as are given."""
        return max(self.config.model.num_layers + 2, len(self.config.parallel.layers_per_chunk or ()))

    def _values(self, key: str, free: Iterable[Any]) -> list[Any]:
        return [_value(self.config, key)] if key in self.fixed else list(free)

    def _alone(self, **keys: Any) -> Layout:
        """The layout of one device, beside which an axis is judged."""
        return Layout(**{"zero": self.config.parallel.zero, "micro": max(self._micros, default=1), **keys})

    def _tensors(self, tps: Collection[int]) -> list[tuple[int, bool]]:
        found = []
        for tp in self._values("parallel.tp", tps):
            for sp in self._values("parallel.sp", (False, True) if tp > 1 else (self.config.parallel.sp,)):
                if _passes(_applied(self.config, self._alone(tp=tp, sp=sp))):
                    found.append((tp, sp))
        return found

    @cached_property
    def _micros(self) -> list[int]:
        alone = Layout(zero=self.config.parallel.zero)
        sizes = self._values("batch.micro", divisors(self.config.batch.total))
        return [micro for micro in sizes if _passes(_applied(self.config, alone._replace(micro=micro)))]

    @cached_property
    def _pipelines(self) -> list[tuple[int, int, str, str]]:
        """Every pp, vpp, schedule and recompute."""
        found = []
        for pp in self._values("parallel.pp", divisors(self.devices, self._most)):
            for vpp in self._values("parallel.vpp", range(1, self._most // pp + 1)):
                for pair in itertools.product(self._schedules(pp, vpp), self._values("train.recompute", RECOMPUTE)):
                    layout = self._alone(pp=pp, vpp=vpp, schedule=pair[0], recompute=pair[1])
                    if _passes(self.applied(layout)):
                        found.append((pp, vpp, *pair))
        return found

    def _schedules(self, pp: int, vpp: int) -> list[str]:
        """Schedules to try: non-interleaved ones for vpp = 1, interleaved ones otherwise. One that keeps all
        micro-batches alive, such as GPipe, is skipped: it is never faster than 1F1B and needs more memory.
        """
        facts = {card.name: card.facts for card in SCHEDULES.cards.values()}
        suit = [name for name in facts if facts[name]["chunks"] == (vpp > 1) and not facts[name]["piles"]]
        return self._values("parallel.schedule", suit[:1] if pp == 1 else suit)


def dropped(config: RunConfig, applied: RunConfig) -> list[str]:
    """The keys that `config` sets and `applied` does not."""
    return [key for key in SUITED if _value(config, key) is not None and _value(applied, key) is None]


def layout_of(config: RunConfig) -> Layout:
    """The layout of a resolved configuration."""
    return Layout(*(_value(config, key) for key in VARIED))


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _applied(config: RunConfig, layout: Layout, fixed: Collection[str] = ()) -> RunConfig:
    p, t = config.parallel, config.train
    parallel = dict(zip(Layout._fields, layout, strict=True))
    batch, train = {"micro": parallel.pop("micro")}, {"recompute": parallel.pop("recompute")}
    cut = p.layers_per_chunk or ()
    suits = {
        "parallel.layers_per_chunk": len(cut) == layout.pp * layout.vpp and sum(cut) == config.model.num_layers,
        "train.recompute_ops": layout.recompute == "selective",
        "train.recompute_chunks": layout.recompute != "none" and max(t.recompute_chunks or [0]) < layout.vpp,
    }
    for key in SUITED:
        section, _, name = key.partition(".")
        if not suits[key] and key not in fixed:
            (parallel if section == "parallel" else train)[name] = None
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
