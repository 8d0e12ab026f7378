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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import getitem, not_
from typing import Literal

from megascale.config.rules import RULES, run_rules
from megascale.config.run import RunConfig
from megascale.config.train import LayerPolicy, TrainConfig, may_have
from megascale.core.errors import ConfigError, Problem
from megascale.core.units import format_bytes
from megascale.layout.parts.microbatch_sizes import UnitBytes
from megascale.plan.account.memory import JobMemory
from megascale.plan.simulate.chunk_time import KindTimes, kind_times
from megascale.plan.simulate.pipeline_times import PipelineTimes
from megascale.plan.simulate.profiles import Hardware, Stack

MEMORY_FRACTION = 0.98  # share of a device's memory to fill: formulas are within 2% of dry runs of large models
HOST_SHARE = 0.5  # of a host's memory for saved tensors: the rest is for readers, copies of the state and caches
MANY = 5000  # counts of a rank from which on only MOST_MIXED policies are mixed
MOST_MIXED = 3
DIGITS = 9  # of seconds, relative: what differs by less is as fast


def with_policies(config: RunConfig, hardware: Hardware, stack: Stack) -> RunConfig:
    """Return a resolved configuration with a policy for every layer in place of `train.memory = "auto"`.

    Raises: ConfigError if no policies fit
    """
    return PolicySearch(config, hardware, stack).choose() if config.train.memory == "auto" else config


def with_memory(train: TrainConfig, policies: Sequence[LayerPolicy]) -> TrainConfig:
    """Return `[train]` with these policies, and without the keys that have no effect beside them."""
    train = train.model_copy(update={"memory": list(policies), "memory_limit": None})
    of_policies = {"nvme": "memory_dir", "selective": "recompute_ops"}
    return train.model_copy(update={key: None for policy, key in of_policies.items() if not may_have(train, policy)})


Mix = tuple[int, ...]
"""The policies of a rank's layers, by their numbers among the options."""


def mixes(layers: int, options: int) -> list[Mix]:
    """List the options of as many layers, for all counts: those with an option are behind each other in its order."""
    mixed = options if math.comb(layers + options - 1, layers) <= MANY else min(options, MOST_MIXED)
    found = dict[Mix, None]()
    for used in itertools.combinations(range(options), mixed):
        found |= dict.fromkeys(itertools.combinations_with_replacement(used, layers))
    return [*found]


def _total(rows: Sequence[Sequence[float]], mix: Mix) -> float:
    """Sum values [layer][option] of the options of a mix."""
    return sum(map(getitem, rows, mix))


@dataclass(frozen=True)
class PolicySearch:
    """The policies of a resolved configuration's layers on hardware with a stack."""

    config: RunConfig
    hardware: Hardware
    stack: Stack

    @property
    def limit(self) -> int:
        """Bytes to fill of `train.memory_limit`, or of the device's memory."""
        limit = self.config.train.memory_limit or self.hardware.memory_limit(self.config.world_size)
        return int(MEMORY_FRACTION * limit)

    @property
    def host_limit(self) -> int:
        """Bytes of host memory for the saved tensors of a rank."""
        return int(HOST_SHARE * self.hardware.node.memory / self.hardware.node.devices)

    def choose(self) -> RunConfig:
        """Return the configuration with the policy of every layer. Raises: ConfigError if no policies fit"""
        found = dict[int, LayerPolicy]()
        for stage in range(self.config.parallel.pp):
            found |= self._of_stage(stage) if [*self._kept.layers(stage)] else {}
        return self._job(found).config

    def options(self, stage: int) -> list[LayerPolicy]:
        """List the policies for layers of a rank: what the device can do by itself, and the stores that it has. Of a
        store, with the MLP in tiles, also the largest share that hides behind compute, and the next one.
        """
        found, tiles = list[LayerPolicy](["keep", "selective", "full"]), self.config.train.mlp_tiles
        stores: dict[Literal["host", "nvme"], object] = {
            "host": self.hardware.device.host_bandwidth,
            "nvme": self.config.train.memory_dir,
        }
        for store in (store for store, given in stores.items() if given):
            shares: list[LayerPolicy] = [{store: tile / tiles} for tile in range(1, tiles)]
            hidden = sum(not any(late for _, _, late in self._account(stage, share)) for share in shares)
            found += [store, *shares[max(0, hidden - 1) : hidden + 1]]
        trains = [with_memory(self.config.train, [each]) for each in found]
        broken = [any(run_rules(RULES, dict(self.config) | {"train": train})) for train in trains]
        return [*itertools.compress(found, map(not_, broken))]

    def _of_stage(self, stage: int) -> dict[int, LayerPolicy]:
        """Return the policies of a rank's layers, the fastest that fit; of equally fast ones those that save more on
        the device. Raises: ConfigError
        """
        kept, (chunks, layers, _) = self._kept, zip(*self._kept.layers(stage), strict=True)
        accounts = [(self._account(stage, option), option) for option in self.options(stage)]
        by_option, options = zip(*sorted(accounts, key=lambda each: -each[0][0][0].backward), strict=True)
        by_layer = [*zip(*by_option, strict=True)]
        saved = [[unit.saved for unit, _, _ in of_layer] for of_layer in by_layer]
        seconds = [[total for _, total, _ in of_layer] for of_layer in by_layer]
        least = kept.rank(stage)
        room, fastest = self.limit - (least.total - least.activations - least.transient), sum(map(min, seconds))
        # with split backwards what is live depends on the policies
        live = [0] * kept.layout.vpp if kept.sizes.split else max(kept.live_counts(stage), key=sum)
        bound = [[live[chunk] * size for size in row] for chunk, row in zip(chunks, saved, strict=True)]

        def rank(mix: Mix) -> tuple[float, float, Mix]:
            return round(_total(seconds, mix) / fastest, DIGITS), -_total(saved, mix), mix

        for mix in sorted(mixes(len(layers), len(options)), key=rank):
            if _total(bound, mix) > room:
                continue
            found = {layer: options[option] for layer, option in zip(layers, mix, strict=True)}
            job = self._job(found)
            if job.rank(stage).total <= self.limit and job.moved_bytes(stage, "host") <= self.host_limit:
                return found
        size = min(self._job(dict.fromkeys(layers, option)).rank(stage).total for option in options)
        message = f"no policies fit: a rank of stage {stage} needs {format_bytes(size)} of {format_bytes(self.limit)}"
        hint = "a smaller batch.micro, more devices, or a layout that megascale plan --search finds"
        raise ConfigError([Problem("configuration", "train.memory", message, hint)])

    def _account(self, stage: int, policy: LayerPolicy) -> list[tuple[UnitBytes, float, float]]:
        """Return the bytes of each layer of a rank with a policy, its seconds, and those of them that copies add."""
        job, (kinds, times) = self._kept.with_policies(with_memory(self.config.train, [policy])), self._kinds
        found = [(job.layer(layer, own), times(*kinds[layer], own)) for _, layer, own in job.layers(stage)]
        return [(unit, each.total, each.forward.offload + each.backward.offload) for unit, each in found]

    def _job(self, policies: Mapping[int, LayerPolicy]) -> JobMemory:
        """Return the memory with policies of layers by their numbers; others keep what they save."""
        every = [policies.get(layer, "keep") for layer in range(self.config.model.total_layers)]
        return self._kept.with_policies(with_memory(self.config.train, every))

    @cached_property
    def _kept(self) -> JobMemory:
        kept = self.config.model_copy(update={"train": with_memory(self.config.train, ["keep"])})
        return JobMemory(kept, self.stack.storage, self.stack.imbalance)

    @cached_property
    def _kinds(self) -> KindTimes:
        return kind_times(PipelineTimes(self._kept.config, self.hardware, self.stack).layers)
