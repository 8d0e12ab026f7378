"""Parameter groups: the update rule, learning rate multiplier and weight decay of every tensor of the model.

A tensor belongs to the one group of `optimizer.groups` whose patterns or kinds it matches; without one, to the rule of
`[optimizer]` if its kind is among those of the rule's card, else to AdamW. The logical parts of a fused weight (q, k
and v; gate and up) are tensors, and may belong to different groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from megascale.catalog.optimizers import MATRIX_UNITS, OPTIMIZERS, REST, with_defaults
from megascale.config.train import OptimizerConfig
from megascale.layout.buckets import BucketLayout, SlotRange, inside, joined
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import Topology


@dataclass(frozen=True)
class ParamGroup:
    """A rule, with the options that differ from its card's, and what scales its steps."""

    rule: str
    weight_decay: float
    lr_mult: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def facts(self) -> Mapping[str, Any]:
        return with_defaults(OPTIMIZERS[self.rule].facts)

    @property
    def needs_matrix(self) -> bool:
        return self.facts["unit_of_work"] in MATRIX_UNITS

    @property
    def all_options(self) -> Mapping[str, Any]:
        """The options with their values, defaults included."""
        return {**self.facts["options"], **self.options}

    @property
    def state(self) -> Mapping[str, str]:
        """The state tensors by name, with their dimensions as letters."""
        return self._with_options("state")

    @property
    def meaning(self) -> str:
        """The meaning of the state, which a rule whose state means the same can take over."""
        return str(self._of_option("meaning") or self.rule)

    @property
    def width_power(self) -> float:
        """The power of the width that divides the learning rate."""
        return float(self._of_option("width_power"))

    def _of_option(self, fact: str) -> Any:
        """Return a fact that may be given by the values of an option."""
        value = self.facts[fact]
        return value[1][self.all_options[value[0]]] if isinstance(value, tuple) else value

    def _with_options(self, fact: str) -> dict[str, Any]:
        """Return a fact, a mapping, with what the values of options add."""
        options, further = self.all_options, self.facts[f"{fact}_with"].items()
        more = [added for (key, value), added in further if options[key] == value]
        return dict(self.facts[fact], **{name: content for added in more for name, content in added.items()})

    def gemms(self, shape: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        """List the GEMMs of the update of a matrix of `shape`: how many a step, and the three dimensions.
        Decompositions are GEMMs with as many multiplications.
        """
        options, sizes = self.all_options, self._sizes(shape)
        times, gap = options.get("ns_steps", 1), options.get("update_gap", 1)
        counts = [(letters, times * count) for letters, count in self._with_options("gemms").items()]
        counts += [(letters, count / gap) for letters, count in self._with_options("decompositions").items()]
        return [(count, tuple(sizes[letter] for letter in letters)) for letters, count in counts]

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the state of a matrix of `shape`; of a stack of matrices, stacked."""
        sizes = self._sizes(shape)
        shapes = dict[str, tuple[int, ...]]()
        for name, letters in self.state.items():
            of, _, block = letters.partition("/")
            dimensions = tuple(sizes[letter] for letter in of) or (1,)
            blocks = (-(-math.prod(dimensions) // int(block)),) if block else ()
            shapes[name] = (*shape[:-2], *(blocks or dimensions))
        return shapes

    def can_keep(self, before: ParamGroup, shape: tuple[int, ...]) -> bool:
        """True if all state of a tensor of `shape` is among that of a group `before`, and means the same."""
        return (
            self.meaning == before.meaning and self._stored_state(shape).items() <= before._stored_state(shape).items()
        )

    def _stored_state(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Return the shape of each state tensor, and if it is in 8 bits."""
        shapes = self.state_shapes(shape) if self.needs_matrix else dict.fromkeys(self.state, shape)
        return {name: (size, name in self.facts["uint8"]) for name, size in shapes.items()}

    def state_bytes(self, shape: tuple[int, ...], wide: int) -> int:
        """Count the bytes of a matrix's state, in elements of `wide` bytes but for those in 8 bits."""
        return sum(
            math.prod(size) * (1 if name in self.facts["uint8"] else wide)
            for name, size in self.state_shapes(shape).items()
        )

    def for_width(self, ratio: float) -> ParamGroup:
        """Return the group with the learning rate of a tensor whose width is `ratio` times that of the model for which
        the rate was chosen; the rate times the weight decay stays (muP, Yang et al. 2022, arXiv:2203.03466).
        """
        factor = ratio**-self.width_power
        return replace(self, lr_mult=self.lr_mult * factor, weight_decay=self.weight_decay / factor)

    def with_options_of(self, name: str) -> ParamGroup:
        """Return the group with its rule's options for a parameter of this name, where none are given."""
        for pattern, options in self.facts["options_of"].items():
            if fnmatchcase(name, pattern):
                return replace(self, options={**options, **self.options})
        return self

    def _sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the dimensions of a matrix of `shape`, or of those of a stack, by letter."""
        (rows, columns), (short, long), options = shape[-2:], sorted(shape[-2:]), self.all_options
        rank, most = min(options.get("rank", short), short), options.get("max_size", long)
        drawn = max(1, int(options.get("density", 1.0) * rows * columns))
        own = {"r": rank, "c": min(options.get("rank", columns), columns), "h": options.get("history", 1), "d": drawn}
        a, b = (max(2, min(size, options.get("block", size))) for size in (rows, columns))
        blocks = {"a": a, "b": b, "x": -(-rows // a), "y": -(-columns // b)}
        blocks |= {"t": a * (a - 1) // 2, "u": b * (b - 1) // 2}
        capped = {"M": rows if rows <= most else 1, "N": columns if columns <= most else 1}
        return {"m": rows, "n": columns, "s": short, "l": long, **own, **blocks, **capped}


class ParamGroups:
    """The groups of `[optimizer]`; `group_of` maps a tensor to its group."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        own = ParamGroup(config.name, config.weight_decay, options=config.options)
        rest = own if config.name == REST else ParamGroup(REST, config.weight_decay)
        self.default, self.rest = own, rest
        self.listed = [self._listed(table) for table in config.groups]

    def _listed(self, table: Mapping[str, Any]) -> ParamGroup:
        rule = table.get("name", self._config.name)
        inherited = self._config.options if rule == self._config.name else {}
        decay = float(table.get("weight_decay", self._config.weight_decay))
        return ParamGroup(rule, decay, float(table.get("lr_mult", 1.0)), {**inherited, **table.get("options", {})})

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of all groups, `REST` included if the rule of `[optimizer]` leaves kinds to it."""
        return tuple(dict.fromkeys(group.rule for group in (self.default, self.rest, *self.listed)))

    @property
    def needs_matrix(self) -> bool:
        """True if the rule of a group needs whole matrices."""
        return any(group.needs_matrix for group in (self.default, self.rest, *self.listed))

    def matches(self, parameter: ParamSpec, tensor: TensorSpec) -> list[int]:
        """Return the indices of the groups of `optimizer.groups` that a tensor of a parameter matches."""
        found = []
        for index, table in enumerate(self._config.groups):
            patterns, kinds = table.get("params"), table.get("kinds")
            named = patterns is None or any(fnmatchcase(tensor.name, pattern) for pattern in patterns)
            if named and (kinds is None or parameter.kind in kinds):
                found.append(index)
        return found

    def group_of(self, parameter: ParamSpec, tensor: TensorSpec) -> ParamGroup:
        listed = [self.listed[index] for index in self.matches(parameter, tensor)]
        by_kind = self.default if parameter.kind in self.default.facts["kinds"] else self.rest
        group = (listed[0] if listed else by_kind).with_options_of(tensor.name)
        return group if tensor.width_ratio == 1 else group.for_width(tensor.width_ratio)


def group_ranges(layout: BucketLayout, groups: ParamGroups, topology: Topology) -> list[tuple[ParamGroup, SlotRange]]:
    """List the tensors of a bucket in order, with their groups, on any rank, and the matrices of stacks where a group
    needs whole ones; none that are frozen. The padding after a parameter belongs to its last tensor.
    """
    if layout.frozen:
        return []
    tensors = layout.tensor_ranges(0, layout.numel, topology)
    grouped = [(groups.group_of(item.slot.parameter, item.tensor), item) for item in tensors]
    found = [(group, part) for group, item in grouped for part in (item.matrices() if group.needs_matrix else [item])]
    stops = [*(item.start for _, item in found[1:]), layout.numel]
    return [(group, replace(item, stop=stop)) for (group, item), stop in zip(found, stops, strict=True)]


def element_ranges(
    layout: BucketLayout, groups: ParamGroups, topology: Topology, shard: tuple[int, int]
) -> list[tuple[ParamGroup, SlotRange]]:
    """List the ranges inside a shard (start, stop) of groups that do not need whole matrices. A range is of one group
    and has equal optimizer flags; the padding after its parameters is included.
    """

    def treatment(pair: tuple[ParamGroup, SlotRange]) -> tuple[ParamGroup, bool, bool]:
        return pair[0], pair[1].slot.parameter.is_matrix, pair[1].slot.parameter.weight_decay

    runs = itertools.groupby(group_ranges(layout, groups, topology), key=treatment)
    return [
        (group, item)
        for (group, *_), pairs in runs
        if not group.needs_matrix
        for item in inside(joined(item for _, item in pairs), *shard)
    ]
