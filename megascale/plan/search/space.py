"""The space of legal layouts on a number of devices (`Space`, `Layout`, `layout_of`).

Divisors are enumerated axis by axis, since most rules of `config.rules` relate keys of one axis: tp, sp and the keys of
cp, or pp, vpp, schedule and recompute. Those of dp, the micro-batch and ep are checked beside a layout's tp and cp.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from megascale.catalog.schedules import SCHEDULES
from megascale.config.batch_rampup import batch_sizes
from megascale.config.finding import divisors
from megascale.config.moe import MOST_BLOCKS
from megascale.config.rules import RULES, Rule, run_rules, sections_of
from megascale.config.run import RunConfig


class Layout(NamedTuple):
    """Values for the keys of `LAYOUT_KEYS`."""

    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_mode: str = "ring"
    cp_a2a_size: int = 1
    pp: int = 1
    vpp: int = 1
    schedule: str = "1f1b"
    dp: int = 1
    micro: int = 1
    recompute: str = "none"
    zero: int = 1
    ep: int = 1
    token_blocks: int = 1
    reshard: str | None = None
    dp_shard: int | None = None
    far_axis: str = "pp"

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        """Order layouts by their values, of which None is the first."""
        one, two = ([(value is not None, value) for value in each] for each in (self, other))
        return one < two


SECTIONS = {"micro": "batch", "recompute": "train", "token_blocks": "moe"}
LAYOUT_KEYS = tuple(f"{SECTIONS.get(name, 'parallel')}.{name}" for name in Layout._fields)
"""Configuration keys of a layout, in the order of the fields of `Layout`."""

DEPENDENT_KEYS = ("parallel.layers_per_chunk", "train.recompute_ops")
"""Keys dropped by layouts with another number of chunks or another recomputation."""

MAX_DEVICE_COUNTS = 17  # most device counts to try for a legal layout
RECOMPUTE = ("none", "selective", "full")  # train.recompute, from the least to the most
CP_MODES = ("ring", "allgather", "ulysses", "usp")
RESHARD = ("keep", "microbatch", "forward")  # parallel.reshard, from the most memory to the least
MIN_SHARED_TOKENS = 4096  # fewest tokens of a sequence on a rank for cp: fewer take less time than their exchange


@cache
def _layout_rules() -> list[Rule]:
    sections = {key.partition(".")[0] for key in LAYOUT_KEYS}
    return [rule for rule in RULES if sections & sections_of(rule)]


@dataclass(frozen=True)
class Space:
    """The layouts of a resolved `config` on `devices`, `node` of them in a node and `island` in an island, 0 for one
    island. Keys in `fixed` keep their values, as do keys without effect: sp without tp, the mode without cp, zero
    without dp.
    """

    config: RunConfig
    devices: int
    fixed: frozenset[str] = frozenset()
    node: int = 1
    island: int = 0

    def layouts(self, tps: Collection[int], *, lean: bool = False) -> Iterator[Layout]:
        """Generate the legal layouts with these tp, in a fixed order. `lean`: only candidates for the lowest memory,
        with the smallest micro-batch and the most recomputation. All have one block of tokens (`token_blocks`).
        """
        total, pipelines = batch_sizes(self.config.batch).common, self._pipelines
        fits = cache(lambda tensors, **keys: self.free.is_legal(Layout(*tensors, **keys)))
        if lean:  # for every pp, vpp and schedule the last pipeline, with the most recomputation
            pipelines = list({pipeline[:3]: pipeline for pipeline in pipelines}.values())
        for tensors, (pp, vpp, schedule, recompute, shardings) in itertools.product(self._tensors(tps), pipelines):
            tp, cp = tensors[0], tensors[2]
            dp, rest = divmod(self.devices, tp * cp * pp)
            if rest or total % dp or dp not in self._values("parallel.dp", [dp]):
                continue
            micros = [micro for micro in self._micros if total // dp % micro == 0 and self._needs_both(cp, micro)]
            micros = [micro for micro in micros if fits(tensors, dp=dp, micro=micro, token_blocks=self._blocks)]
            for micro in micros[:1] if lean else micros:
                eps = [ep for ep in self._eps(tp * cp * dp) if fits(tensors, dp=dp, micro=micro, ep=ep)]
                zero = self.config.parallel.zero
                own = [each for each in shardings if cp * dp > 1 or each[0] == zero] or shardings[:1]
                for (zero, reshard), ep, far in itertools.product(own, eps, self._far(pp, dp)):
                    every = Layout(*tensors, pp, vpp, schedule, dp, micro, recompute, zero, ep, self._blocks, reshard)
                    yield from (every._replace(dp_shard=inner, far_axis=far) for inner in self._inner(every))

    def token_blocks(self, layout: Layout) -> list[int]:
        """List the legal blocks of a layout's tokens, whatever its own: one where no GEMMs of other blocks can hide the
        exchange.
        """
        if layout.ep == 1 or "moe.token_blocks" in self.fixed or SCHEDULES[layout.schedule].facts["pairs"]:
            return [self._blocks]
        length = self.config.data.sequence_chunk_tokens or self.config.model.seq_length
        return divisors(layout.micro * length // (layout.cp * layout.tp), MOST_BLOCKS)

    def with_layout(self, layout: Layout) -> RunConfig:
        """Return the resolved configuration with this layout."""
        config = self.config
        sizes = config.parallel.layers_per_chunk or ()
        suits = {
            "parallel.layers_per_chunk": len(sizes) == layout.pp * layout.vpp and sum(sizes) == config.model.num_layers,
            "train.recompute_ops": layout.recompute == "selective",
        }
        values = dict(zip(LAYOUT_KEYS, layout, strict=True))
        values["parallel.vocab_pp"] = config.parallel.vocab_pp if layout.pp > 1 else 0
        values |= {key: None for key in DEPENDENT_KEYS if not suits[key] and key not in self.fixed}
        updates = defaultdict[str, dict[str, Any]](dict)
        for key, value in values.items():
            section, _, name = key.partition(".")
            updates[section][name] = value
        return config.changed(**updates)

    @cached_property
    def free(self) -> Space:
        """The space without fixed keys."""
        return replace(self, fixed=frozenset())

    def is_legal(self, layout: Layout) -> bool:
        """Check all rules that read a section of `LAYOUT_KEYS`."""
        return not any(run_rules(_layout_rules(), dict(self.with_layout(layout))))

    def nearest_legal(self) -> int | None:
        """Find the nearest other number of devices with a legal layout, trying `MAX_DEVICE_COUNTS` numbers."""
        tps = self._values("parallel.tp", divisors(self.config.model.num_heads))
        pps = self._values("parallel.pp", range(1, self._most_chunks + 1))
        dps = self._values("parallel.dp", divisors(self.config.batch.total))
        cps = self._values("parallel.cp", [1])
        counts = {math.prod(sizes) for sizes in itertools.product(tps, cps, pps, dps)} - {self.devices}
        near = sorted(counts, key=lambda count: (abs(count - self.devices), count))[:MAX_DEVICE_COUNTS]
        return next((count for count in near if any(replace(self, devices=count).layouts(tps))), None)

    @property
    def _most_chunks(self) -> int:
        """Most chunks of a pipeline: as given, or one per layer, embedding and head."""
        return max(self.config.model.num_layers + 2, len(self.config.parallel.layers_per_chunk or ()))

    def _values(self, key: str, free: Iterable[Any]) -> list[Any]:
        return [value_of(self.config, key)] if key in self.fixed else list(free)

    def _in_one(self, micro: int, *tensors: Any, **keys: Any) -> Layout:
        """Build a layout with these keys and one micro-batch a step, to check the rules of an axis alone."""
        dp = max(1, batch_sizes(self.config.batch).common // micro)
        return Layout(*tensors, **{"micro": micro, "dp": dp, "token_blocks": self._blocks, **keys})

    @cached_property
    def _blocks(self) -> int:
        (blocks,) = self._values("moe.token_blocks", [1])
        return int(blocks)

    @cached_property
    def _micros(self) -> list[int]:
        sizes = self._values("batch.micro", divisors(self.config.batch.total))
        return [micro for micro in sizes if self.free.is_legal(self._in_one(micro))]

    def _needs_both(self, cp: int, micro: int) -> bool:
        """Return True unless both have a common divisor: divided by it they give a rank as many tokens, and less to
        exchange.
        """
        return math.gcd(cp, micro) == 1 or not self.fixed.isdisjoint(("parallel.cp", "parallel.dp", "batch.micro"))

    def _eps(self, ranks: int) -> list[int]:
        """List the ep that divide the `ranks` of a pipeline stage."""
        experts = self.config.model.experts
        eps = self._values("parallel.ep", divisors(math.gcd(ranks, experts)) if experts else [1])
        return [ep for ep in eps if ranks % ep == 0]

    def _far(self, pp: int, dp: int) -> list[str]:
        """List the axes that can cross islands: dp if each island has an equal part of every stage."""
        islands = math.ceil(self.devices / self.island) if self.island else 1
        both = pp > 1 and islands > 1 and dp % islands == 0
        return self._values("parallel.far_axis", ("pp", "dp") if both else ("pp",))

    def _tensors(self, tps: Collection[int]) -> list[tuple[int, bool, int, str, int]]:
        """List all legal (tp, sp, cp, cp_mode, cp_a2a_size)."""
        return [
            (tp, sp, *shared)
            for tp in self._values("parallel.tp", tps)
            for sp in self._values("parallel.sp", (False, True) if tp > 1 else (self.config.parallel.sp,))
            for shared in self._contexts()
            if self.free.is_legal(self._in_one(max(self._micros, default=1), tp, sp, *shared))
        ]

    def _contexts(self) -> Iterator[tuple[int, str, int]]:
        """Generate (cp, cp_mode, cp_a2a_size)."""
        most = max(1, self.config.model.seq_length // MIN_SHARED_TOKENS)
        for cp in self._values("parallel.cp", divisors(self.devices, most)):
            for mode in self._values("parallel.cp_mode", CP_MODES if cp > 1 else (self.config.parallel.cp_mode,)):
                heads = divisors(cp)[1:-1] if mode == "usp" and cp > 1 else [1]
                yield from ((cp, mode, count) for count in self._values("parallel.cp_a2a_size", heads))

    @cached_property
    def _pipelines(self) -> list[tuple[int, int, str, str, list[tuple[int, str | None]]]]:
        """All legal (pp, vpp, schedule, recompute), with their `_shardings`."""
        most = max(self._micros, default=1)
        return [
            (pp, vpp, schedule, recompute, self._shardings(pp, vpp, schedule, recompute))
            for pp in self._values("parallel.pp", divisors(self.devices, self._most_chunks))
            for vpp in self._values("parallel.vpp", range(1, self._most_chunks // pp + 1))
            for schedule in self._schedules(pp, vpp)
            for recompute in self._values("train.recompute", RECOMPUTE)
            if self.is_legal(self._in_one(most, pp=pp, vpp=vpp, schedule=schedule, recompute=recompute))
        ]

    def _inner(self, layout: Layout) -> list[int | None]:
        """List the legal dp_shard of a layout: all ranks, and with sharded weights those in a node."""
        ranks = layout.tp * layout.cp
        fills = self.node % ranks == 0 and ranks < self.node < ranks * layout.dp
        given = self._values("parallel.dp_shard", [None, self.node // ranks] if layout.zero == 3 and fills else [None])
        return [n for n in given if not n or (layout.zero and layout.dp % n == ranks * n % layout.ep == 0)]

    def _shardings(self, pp: int, vpp: int, schedule: str, recompute: str) -> list[tuple[int, str | None]]:
        """List the legal (zero, reshard), from the most memory to the least. Unless weights are to be sharded, of the
        ways to gather them only the last is listed: others take more memory than zero 2, or expose more.
        """
        ways = self._values("parallel.reshard", RESHARD if "parallel.zero" in self.fixed else RESHARD[-1:])
        given = range(3, 4) if ways[0] else range(3)  # a way is of sharded weights alone
        zeros = self._values("parallel.zero", given if "parallel.reshard" in self.fixed else range(4))
        shardings = [(zero, way) for zero in zeros for way in (ways if zero == 3 else [None])]
        keys = {"pp": pp, "vpp": vpp, "schedule": schedule, "recompute": recompute}
        most = max(self._micros, default=1)
        return [
            (zero, way)
            for zero, way in shardings
            if zero < 2 or self.is_legal(self._in_one(most, **keys, zero=zero, reshard=way))
        ]

    def _schedules(self, pp: int, vpp: int) -> list[str]:
        """List the schedules with as many chunks. Those with all micro-batches in flight, such as GPipe, are skipped:
        1F1B is as fast with less memory.
        """
        bounded = {name: card.facts for name, card in SCHEDULES.cards.items() if not card.facts["unbounded_in_flight"]}
        if not self.config.model.experts:  # pairs hide nothing
            bounded = {name: facts for name, facts in bounded.items() if not facts["pairs"]}
        suited = [name for name, facts in bounded.items() if (facts["v"] or max(2, vpp)) == vpp]
        return self._values("parallel.schedule", suited[:1] if pp == 1 else suited)


def layout_of(config: RunConfig) -> Layout:
    """Return the layout of a resolved configuration."""
    return Layout(*(value_of(config, key) for key in LAYOUT_KEYS))


def value_of(config: RunConfig, key: str) -> Any:
    """Return the value of a key such as parallel.tp."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
