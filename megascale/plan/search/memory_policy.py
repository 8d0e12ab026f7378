"""The choice of `train.memory = "auto"` (`with_policies`): what layers do with the tensors that they save, of least
step time within the memory of a device and of its host.

As in ProTrain (Yang et al. 2024) few counts are searched, the layers of a rank with each policy; and as in MEMO (Zhao
et al. 2024) the share of tokens that moves is the largest whose copies hide behind the layer's compute.

- A rank's peak depends on its own layers alone, and a step takes no longer if a rank's layers take less time: ranks are
  searched one by one.
- With equal counts equal layers take as long, and need least memory if those with most transient bytes come first: most
  micro-batches are in flight there, and their backward comes when later layers have freed what they saved.
- Counts are tried in the order of their seconds; bounds by saved bytes rule most of them out.
- In a deep model a rank mixes up to three policies: the optimum of a linear programme has no more than its constraints,
  the layers, the device and the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from megascale.config.rules import RULES, run_rules
from megascale.config.run import RunConfig
from megascale.config.train import LayerPolicy, TrainConfig, may_have
from megascale.core.errors import ConfigError, Problem
from megascale.core.units import format_bytes
from megascale.layout.parts.times import PassTimes, Seconds
from megascale.layout.recompute_policy import RecomputePolicy
from megascale.plan.account.memory import JobMemory
from megascale.plan.simulate.chunk_time import layer_times
from megascale.plan.simulate.pipeline_times import PipelineTimes
from megascale.plan.simulate.profiles import Hardware, Stack

if TYPE_CHECKING:
    import numpy as np

MEMORY_FRACTION = 0.98  # share of a device's memory to fill: formulas are within 2% of dry runs of large models
HOST_SHARE = 0.5  # of a host's memory for saved tensors: the rest is for readers, copies of the state and caches
MANY = 5000  # counts of a rank from which on only MOST_MIXED policies are mixed
MOST_MIXED = 3
DIGITS = 9  # of seconds, relative: what differs by less is as fast


def with_policies(config: RunConfig, hardware: Hardware, stack: Stack) -> RunConfig:
    """Return a resolved configuration with a policy for every layer in place of `train.memory = "auto"`.

    Raises: ConfigError if no policies fit
    """
    if config.train.memory != "auto":
        return config
    kept = JobMemory(config, stack.storage, stack.imbalance)  # before the choice layers keep all that they save
    time, found = layer_times(PipelineTimes(config, hardware, stack).layers), dict[int, LayerPolicy]()
    for stage in range(config.parallel.pp):
        found |= fastest(kept, hardware, time, stage) if [*kept.layers(stage)] else {}
    return job_with(kept, found).config


def refuse_small_limit(config: RunConfig, limit: int) -> None:
    """Refuse a `train.memory_limit` that no policies fit, on any hardware. Raises: ConfigError"""
    jobs = [job for _, job in legal(JobMemory(config), ["keep", "selective", "full", "host", "nvme"])]
    for stage in range(config.parallel.pp):
        beside, live = least_bytes(jobs, stage)
        saved = zip(live, *([unit.saved for *_, unit in job.layers(stage)] for job in jobs), strict=True)
        if beside + sum(count * min(sizes) for count, *sizes in saved) > (filled := int(MEMORY_FRACTION * limit)):
            raise no_fit(jobs, stage, filled)


def with_memory(train: TrainConfig, policies: Sequence[LayerPolicy]) -> TrainConfig:
    """Return `[train]` with these policies, and without the keys that have no effect beside them."""
    train = train.model_copy(update={"memory": list(policies), "memory_limit": None})
    of_policies = {"nvme": "memory_dir", "selective": "recompute_ops"}
    return train.model_copy(update={key: None for policy, key in of_policies.items() if not may_have(train, policy)})


Option = tuple[LayerPolicy, JobMemory]
"""A policy, and the memory of a job with it in all layers."""

LayerTime = Callable[[int, RecomputePolicy], PassTimes]
"""Times a layer by its number."""


def legal(job: JobMemory, policies: Iterable[LayerPolicy]) -> list[Option]:
    """Return those of some policies that a job can have."""
    trains = [(policy, with_memory(job.config.train, [policy])) for policy in policies]
    rest = dict(job.config)
    return [(each, job.with_policies(own)) for each, own in trains if not any(run_rules(RULES, rest | {"train": own}))]


def least_bytes(jobs: Sequence[JobMemory], stage: int) -> tuple[int, list[int]]:
    """Bound the memory of a rank whose layers have policies of `jobs`, each of one policy: the bytes beside what layers
    save, and of each layer how many micro-batches are in flight.
    """
    job, rank = jobs[0], jobs[0].rank(stage)
    # with split backwards what is live depends on the policies
    live = [0] * job.layout.vpp if job.sizes.split else max(job.live_counts(stage), key=sum)
    state, beside = rank.total - rank.activations - rank.transient, min(job.least_transient(stage) for job in jobs)
    return state + beside, [live[chunk] for chunk, *_ in job.layers(stage)]


def no_fit(jobs: Sequence[JobMemory], stage: int, limit: int) -> ConfigError:
    """Say what a rank needs at least with one policy of `jobs`."""
    size = min(job.rank(stage).total for job in jobs)
    message = f"no policies fit: a rank of stage {stage} needs {format_bytes(size)} of {format_bytes(limit)}"
    hint = "a smaller batch.micro, more devices, or a layout that megascale plan --search finds"
    return ConfigError([Problem("configuration", "train.memory", message, hint)])


def mixes(layers: int, options: int) -> np.ndarray:
    """List how layers can share options, for all counts: row by row the first layer of each option, all of which are
    behind each other in its order, and then the number of layers. u16.
    """
    import numpy as np

    mixed = options if math.comb(layers + options - 1, layers) <= MANY else MOST_MIXED
    found = list[np.ndarray]()
    for count in range(1, min(mixed, options, layers) + 1):
        inner = np.array([*itertools.combinations(range(1, layers), count - 1)], np.uint16)
        begins = np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, layers)))
        for used in itertools.combinations(range(options), count):
            found.append(begins[:, np.searchsorted(used, range(options + 1))])
    return np.concatenate(found)


def totals(mixed: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sum values [option, layer] over the layers of each of `mixes`."""
    import numpy as np

    sums = np.pad(np.cumsum(values, 1), ((0, 0), (1, 0)))
    return sum(row[end] - row[begin] for row, begin, end in zip(sums, mixed.T, mixed.T[1:], strict=False))


def limits(config: RunConfig, hardware: Hardware) -> tuple[int, int]:
    """Return bytes to fill of a device, or of `train.memory_limit`, and of a host for the saved tensors of a rank."""
    limit = config.train.memory_limit or hardware.memory_limit(config.world_size)
    return int(MEMORY_FRACTION * limit), int(HOST_SHARE * hardware.node.memory / hardware.node.devices)


def layer_seconds(time: LayerTime, job: JobMemory, stage: int) -> list[Seconds]:
    """Time forward and backward together of the layers of a rank."""
    passes = (time(layer, policy) for _, layer, policy, _ in job.layers(stage))
    return [each.forward + each.backward for each in passes]


def policy_options(kept: JobMemory, hardware: Hardware, time: LayerTime, stage: int) -> list[Option]:
    """List the policies for layers of a rank: what the device can do by itself, and the stores that it
    has. Of a store, with the MLP in tiles, also the largest share that hides behind compute, and the next one. Those
    with most transient bytes in backward come first.
    """
    found, train = list[LayerPolicy](["keep", "selective", "full"]), kept.config.train
    stores: dict[Literal["host", "nvme"], object] = {"host": hardware.device.host_bandwidth, "nvme": train.memory_dir}
    for store in (store for store, given in stores.items() if given):
        shares: list[LayerPolicy] = [{store: tile / train.mlp_tiles} for tile in range(1, train.mlp_tiles)]
        late = [any(each.offload for each in layer_seconds(time, job, stage)) for _, job in legal(kept, shares)]
        found += [store, *shares[max(0, late.count(False) - 1) : late.count(False) + 1]]
    return sorted(legal(kept, found), key=lambda option: -next(option[1].layers(stage))[-1].backward)


def fastest(kept: JobMemory, hardware: Hardware, time: LayerTime, stage: int) -> dict[int, LayerPolicy]:
    """Return the policies of a rank's layers, the fastest that fit; of equally fast ones those that save more on the
    device. Raises: ConfigError
    """
    import numpy as np

    options, (limit, host_limit) = policy_options(kept, hardware, time, stage), limits(kept.config, hardware)
    jobs, layers = [job for _, job in options], [layer for _, layer, *_ in kept.layers(stage)]
    saved = np.array([[unit.saved for *_, unit in job.layers(stage)] for job in jobs])
    moved = np.array([[unit.moved * (own.store == "host") for *_, own, unit in job.layers(stage)] for job in jobs])
    mixed, (beside, live) = mixes(len(layers), len(options)), least_bytes(jobs, stage)
    mixed = mixed[(totals(mixed, saved * live) <= limit - beside) & (totals(mixed, moved * live) <= host_limit)]
    seconds = np.array([[each.total for each in layer_seconds(time, job, stage)] for job in jobs])
    relative = np.round(totals(mixed, seconds) / seconds.min(0).sum(), DIGITS)
    for begins in mixed[np.lexsort((*(len(layers) - mixed.T)[::-1], -totals(mixed, saved), relative))]:
        counts = zip(options, np.diff(begins), strict=True)
        found = dict(zip(layers, (policy for (policy, _), count in counts for _ in range(count)), strict=True))
        job = job_with(kept, found)
        if job.rank(stage).total <= limit and job.moved_bytes(stage, "host") <= host_limit:
            return found
    raise no_fit(jobs, stage, limit)


def job_with(job: JobMemory, policies: Mapping[int, LayerPolicy]) -> JobMemory:
    """Return the memory with policies of layers by their numbers; others keep what they save."""
    every = [policies.get(layer, "keep") for layer in range(job.config.model.total_layers)]
    return job.with_policies(with_memory(job.config.train, every))
