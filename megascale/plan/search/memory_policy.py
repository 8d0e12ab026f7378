"""The choice of `train.memory = "auto"` (`PolicySearch`): what layers do with the tensors that they save, of least step
time within the memory of a device and of its host.

As in ProTrain (Yang et al. 2024) few counts are searched, the layers of a rank with each policy; and as in MEMO (Zhao
et al. 2024) the share of tokens that moves is the largest whose copies hide behind the layer's compute.

- A rank's peak depends on its own layers alone, and a step takes no longer if a rank's layers take less time: ranks are
  searched one by one.
- With equal counts equal layers take as long, and need least memory if those with most transient bytes come first: most
  micro-batches are in flight there, and their backward comes when later layers have freed what they saved.
- Counts are tried in the order of their seconds; a bound by saved bytes rules most of them out.
- In a deep model a rank mixes up to three policies: the optimum of a linear programme has no more than its constraints,
  the layers, the device and the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megascale.config.rules import RULES, run_rules
from megascale.config.run import RunConfig
from megascale.config.section import AUTO
from megascale.config.train import LayerPolicy, may_have
from megascale.core.errors import ConfigError, Problem
from megascale.core.units import format_bytes
from megascale.layout.blocks import distinct_blocks
from megascale.layout.chunks import fp8_layers
from megascale.layout.parts.times import PassTimes
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.state_bytes import state_bytes
from megascale.plan.simulate.chunk_time import kind_times
from megascale.plan.simulate.pipeline_times import PipelineTimes
from megascale.plan.simulate.profiles import Hardware, Stack

MEMORY_FRACTION = 0.98  # share of a device's memory to fill: formulas are within 2% of dry runs of large models
HOST_SHARE = 0.5  # of a host's memory for saved tensors: the rest is for readers, copies of the state and caches
MANY = 5000  # counts of a rank from which on only MOST_MIXED policies are mixed
MOST_MIXED = 3
DIGITS = 9  # of seconds, relative: what differs by less is as fast

Store = Literal["host", "nvme"]

Mix = tuple[tuple[int, range], ...]
"""The policies of a rank's layers: the number of an option, and the layers with it, counted on the rank."""


def with_policies(config: RunConfig, hardware: Hardware, stack: Stack) -> RunConfig:
    """Return a resolved configuration with a policy for every layer in place of `train.memory = "auto"`.

    Raises: ConfigError if no policies fit
    """
    return with_memory(config, choose(config, hardware, stack)) if config.train.memory == AUTO else config


def choose(config: RunConfig, hardware: Hardware, stack: Stack) -> list[LayerPolicy]:
    """Return the policy of every layer, within `MEMORY_FRACTION` of `train.memory_limit`, or of the device's memory.

    Raises: ConfigError if no policies fit
    """
    limit = config.train.memory_limit or hardware.memory_limit(config.world_size)
    return PolicySearch(config, hardware, stack, int(MEMORY_FRACTION * limit)).choose()


def with_memory(config: RunConfig, policies: Sequence[LayerPolicy]) -> RunConfig:
    """Return a configuration with these policies, and without the keys that have no effect beside them."""
    train = config.train.model_copy(update={"memory": list(policies), "memory_limit": None})
    of_policies = {"nvme": "memory_dir", "selective": "recompute_ops"}
    unused = {key: None for policy, key in of_policies.items() if not may_have(train, policy)}
    return config.model_copy(update={"train": train.model_copy(update=unused)})


def describe_policies(config: RunConfig) -> str:
    """Describe the policies of all layers, such as 'layers 0-3 full, 4-7 keep', or 'host, keep by turns'."""
    policies, total, begin = config.train.memory or ["keep"], config.model.total_layers, 0
    names = [each if isinstance(each, str) else "{} {:g}".format(*next(iter(each.items()))) for each in policies]
    if 1 < len(names) < total:
        return f"{', '.join(names)} by turns"
    runs = list[str]()
    for name, same in itertools.groupby(itertools.islice(itertools.cycle(names), total)):
        last = begin + len(list(same)) - 1
        runs.append(f"{begin}{f'-{last}' if last > begin else ''} {name}")
        begin = last + 1
    return f"layers {', '.join(runs)}"


def mixes(layers: int, options: int) -> Iterator[Mix]:
    """Generate the counts of options for as many layers, each option's layers behind each other in their order."""
    mixed = options if math.comb(layers + options - 1, layers) <= MANY else MOST_MIXED
    for size in range(1, min(mixed, options, layers) + 1):
        for used in itertools.combinations(range(options), size):
            for cuts in itertools.combinations(range(1, layers), size - 1):
                ends = 0, *cuts, layers
                yield tuple(zip(used, itertools.starmap(range, itertools.pairwise(ends)), strict=True))


def _ends(rows: Iterable[Iterable[float]]) -> list[list[float]]:
    """Sum values of the layers with each option: of all before a layer."""
    return [[*itertools.accumulate(row, initial=0.0)] for row in rows]


def _total(ends: Sequence[Sequence[float]], mix: Mix) -> float:
    return sum(ends[option][at.stop] - ends[option][at.start] for option, at in mix)


@dataclass(frozen=True)
class PolicySearch:
    """The policies of a resolved configuration's layers on hardware with a stack, within `limit` bytes of a device."""

    config: RunConfig
    hardware: Hardware
    stack: Stack
    limit: int

    def choose(self) -> list[LayerPolicy]:
        """Return the policy of every layer. Raises: ConfigError if no policies fit"""
        found = list[LayerPolicy](["keep"]) * self.config.model.total_layers
        for stage in range(self.config.parallel.pp):
            for (_, layer), policy in zip(self.layers(stage), self._of_stage(stage), strict=True):
                found[layer] = policy
        return found

    @property
    def host_limit(self) -> int:
        """Bytes of host memory for the saved tensors of a rank."""
        return int(HOST_SHARE * self.hardware.node.memory / self.hardware.node.devices)

    def layers(self, stage: int) -> list[tuple[int, int]]:
        """List the layers of a rank with their chunks, which begin with most micro-batches in flight."""
        layout = self._kept.layout
        return [(chunk, at) for chunk in range(layout.vpp) for at in layout.layers(layout.index(stage, chunk))]

    def options(self, stage: int) -> list[LayerPolicy]:
        """List the policies for layers of a rank: what the device can do by itself, and the stores that it has. Of a
        store, with the MLP in tiles, also the largest share that hides behind compute.
        """
        found, tiles = list[LayerPolicy](["keep", "selective", "full"]), self.config.train.mlp_tiles
        stores: dict[Store, object] = {
            "host": self.hardware.device.host_bandwidth,
            "nvme": self.config.train.memory_dir,
        }
        for store in (store for store, given in stores.items() if given):
            found.append(store)
            shares: list[LayerPolicy] = [{store: tile / tiles} for tile in range(1, tiles)]
            found += [share for share in shares if self._hides(share, stage)][-1:]
        return [each for each in found if not any(run_rules(RULES, dict(with_memory(self.config, [each]))))]

    def fits(self, stage: int, policies: Sequence[LayerPolicy]) -> bool:
        """True if the layers of a rank fit with these policies, on the device and in host memory."""
        job = self._job(stage, policies)
        return job.rank(stage).total <= self.limit and job.moved_bytes(stage, "host") <= self.host_limit

    def seconds(self, stage: int, policy: LayerPolicy) -> list[float]:
        """Seconds of each layer of a rank with a policy, forward and backward of a micro-batch."""
        return [each.total for each in self._passes(stage, policy)]

    def _of_stage(self, stage: int) -> list[LayerPolicy]:
        """Return the policies of a rank's layers, the fastest that fit; of equally fast ones those that keep more.
        Raises: ConfigError
        """
        layers, given = self.layers(stage), self.options(stage)
        if not layers:
            return []
        units = {
            number: [self._kept.layer(layer, self._policy(option, chunk, layer)) for chunk, layer in layers]
            for number, option in enumerate(given)
        }
        order = sorted(units, key=lambda number: -units[number][0].backward)
        seconds = _ends(self.seconds(stage, given[number]) for number in order)
        # with split backwards what is live depends on the policies
        counts = set[tuple[int, ...]]() if self._kept.sizes.split else self._kept.live_counts(stage)
        saved = [
            _ends(
                [live[chunk] * unit.saved for (chunk, _), unit in zip(layers, units[number], strict=True)]
                for number in order
            )
            for live in counts
        ]
        room = self.limit - state_bytes(self.config, stage, self.stack.storage).total
        fastest = min(row[-1] for row in seconds)

        def rank(mix: Mix) -> tuple[float, int]:
            return round(_total(seconds, mix) / fastest, DIGITS), sum(order[option] * len(at) for option, at in mix)

        for mix in sorted(mixes(len(layers), len(given)), key=rank):
            policies = [given[order[option]] for option, at in mix for _ in at]
            if all(_total(each, mix) <= room for each in saved) and self.fits(stage, policies):
                return policies
        raise self._too_large(stage, given)

    def _too_large(self, stage: int, options: Sequence[LayerPolicy]) -> ConfigError:
        """Say by how much the layers of a rank do not fit, with the same policy in all of them."""
        count = len(self.layers(stage))
        least = min(self._job(stage, [option] * count).rank(stage).total for option in options)
        message = f"no policies fit: a rank of stage {stage} needs {format_bytes(least)} of {format_bytes(self.limit)}"
        hint = "a smaller batch.micro, more devices, or a layout that megascale plan --search finds"
        return ConfigError([Problem("configuration", "train.memory", message, hint)])

    def _hides(self, policy: LayerPolicy, stage: int) -> bool:
        """True if the copies of a rank's layers take no longer than their compute."""
        return all(each.forward.offload + each.backward.offload == 0.0 for each in self._passes(stage, policy))

    def _passes(self, stage: int, policy: LayerPolicy) -> Iterator[PassTimes]:
        """Time each layer of a rank with a policy."""
        c = self.config
        numbers, fp8 = distinct_blocks(c.model, tuple(c.train.freeze))[1], fp8_layers(c.model, c.train, c.fp8)
        for chunk, layer in self.layers(stage):
            yield self._times(numbers[layer], layer in fp8, self._policy(policy, chunk, layer))

    def _policy(self, policy: LayerPolicy, chunk: int, layer: int) -> RecomputePolicy:
        return recompute_policy(with_memory(self.config, [policy]).train, chunk, layer)

    def _job(self, stage: int, policies: Sequence[LayerPolicy]) -> JobMemory:
        """Return the memory with policies of a rank's layers; other layers keep what they save."""
        found = list[LayerPolicy](["keep"]) * self.config.model.total_layers
        for (_, layer), policy in zip(self.layers(stage), policies, strict=True):
            found[layer] = policy
        return self._kept.with_config(with_memory(self.config, found))

    @cached_property
    def _kept(self) -> JobMemory:
        return JobMemory(with_memory(self.config, ["keep"]), self.stack.storage, self.stack.imbalance)

    @cached_property
    def _times(self) -> Callable[[int, bool, RecomputePolicy], PassTimes]:
        return kind_times(PipelineTimes(self._kept.config, self.hardware, self.stack).layers)
