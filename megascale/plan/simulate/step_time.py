"""Step time of a configuration on hardware with a stack, by cause (`StepParts`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from statistics import fmean

from megascale.catalog.precisions import PRECISIONS
from megascale.layout.chunks import held_chunks, stages_of
from megascale.layout.parts.times import Seconds
from megascale.plan.account.attended import expected_scores
from megascale.plan.account.flops import mfu, model_flops
from megascale.plan.account.optimizer_state import StageOptimizer
from megascale.plan.account.traffic import mean_calls
from megascale.plan.simulate.host_update import host_update
from megascale.plan.simulate.pipeline_times import PipelineTimes
from megascale.plan.simulate.profiles import LARGE_JOB, Stack


@dataclass(frozen=True)
class Estimate:
    """An estimated step. `causes`: seconds of the mean pipeline rank by cause, with `step_s` as sum."""

    step_s: float
    tokens_per_s: float
    mfu_full: float
    mfu_causal: float
    causes: dict[str, float]


@dataclass(frozen=True)
class StepParts(PipelineTimes):
    """Durations of a step's parts in seconds: of the pipeline, of the optimizer, and what large jobs lose."""

    @property
    def estimate(self) -> Estimate:
        config, hardware = self.config, self.hardware
        without_messages = replace(self.times, message=0.0, receive=0.0, far=0.0)
        compute_only = replace(without_messages, reduce={}, gather={})
        ended, without_pp, without_dp = map(self.pipeline_s, (self.times, without_messages, compute_only))
        step = self.seconds(ended)
        plain = self.pipeline_s(replace(compute_only, hidden={})) if self.times.hidden else without_dp
        causes = self._causes(ended, min(ended, without_pp), min(ended, without_pp, without_dp))
        hidden = plain - without_dp  # by overlapped forwards and backwards
        causes |= {"ep": causes["ep"] - hidden, "bubble": causes["bubble"] + hidden}
        tokens = config.batch.total * config.model.seq_length / step
        flops = model_flops(config, expected_scores(config.model, config.data))
        dtype = "fp8" if config.train.quantizes else self.layers.kernels.dtype
        peak = fmean(fmean(on.hardware.device.peak_of(dtype) for on in stage) for stage in self.machines)
        peak *= config.world_size / hardware.node.ranks_per_core(config.world_size)  # as training reports MFU
        return Estimate(step, tokens, mfu(flops.full, tokens, peak), mfu(flops.causal, tokens, peak), causes)

    @property
    def step_s(self) -> float:
        return self.seconds(self.pipeline_s(self.times))

    @cached_property
    def update(self) -> float:
        """Seconds of the optimizer on the largest rank: state is read and written, gradients are read and cleared;
        GEMMs of rules of whole matrices on the owner with most, with decompositions at the rate of GEMMs. State in host
        memory is updated first.
        """
        facts = PRECISIONS[self.config.train.precision].facts
        p, (compute, wide) = self.config.parallel, self.config.train.element_bytes
        stages = [StageOptimizer(self.config, rank) for rank in range(p.pp)]
        held = [tuple(chain(*(self.buckets[rank, chunk] for chunk in held_chunks(p)))) for rank in range(p.pp)]
        elements = max(sum(numel for _, numel, _ in buckets) for buckets in held)
        shard = max(self.dp.shard(buckets) for buckets in held)
        gradients = shard if p.zero >= 2 else elements
        masters, host = wide * shard if facts["master_weights"] else 0, host_update(self.config, self.hardware)
        state = 0 if host else masters + max(stage.state_bytes(1 if self.dp.sharded else 0) for stage in stages)
        moved = 2 * state + shard * (2 * wide + compute) + gradients * wide
        gemms = [
            sum(
                sum(count * self.layers.kernels.gemm(*sizes) for count, sizes in group.gemms(shape))
                for group, shape in stage.fullest_owner()
            )
            for stage in stages
        ]
        on_host = host.seconds(self.config.optimizer.offload_stride) if host else 0.0
        return moved / self.layers.kernels.bandwidth + max(gemms) + on_host

    @cached_property
    def slowest_update(self) -> float:
        """Seconds of the optimizer in the slowest island."""
        return max(on.update for on in chain(*self.machines))

    def seconds(self, pipeline: float) -> float:
        """Seconds of a step from seconds of the pipeline, with the loss of large jobs."""
        return self._unscaled(pipeline) * scale(self.config.world_size, self.stack)

    def _unscaled(self, pipeline: float) -> float:
        """Seconds of a step without the loss of large jobs. Ranks on the same core take turns."""
        fixed = self.slowest_update + self.stack.attained.step_s
        crowd = self.hardware.node.ranks_per_core(self.config.world_size)
        if crowd == 1:
            return pipeline + fixed
        p, count, times = self.config.parallel, self.config.num_microbatches, self.times
        at = stages_of(self.config.model, p).placement
        work = sum(at.visits(*place, count) * (times.forward[place] + times.backward[place]) for place in times.forward)
        work += count * self.config.dropped_share * sum(times.forward.values())
        work += sum([*times.reduce.values(), *times.gather.values()])
        for path, number in at.counted_paths(count).items():
            hops = sum(at.places[one][0] != at.places[other][0] for one, other in pairwise(path))
            work += 2 * hops * number * (times.message + times.receive)
        waits = (crowd - 1) * self.hardware.node.turn_s * mean_calls(self.config)  # a rank finds the caches cold
        return max(pipeline + fixed, crowd * (work / p.pp + fixed) + waits)

    def _causes(self, ended: float, without_pp: float, without_dp: float) -> dict[str, float]:
        """Seconds of the mean rank by cause. `without_pp`: pipeline without messages; `without_dp`: compute only."""
        count, fixed = self.config.num_microbatches, self.stack.attained.step_s
        visits, pairs = stages_of(self.config.model, self.config.parallel).placement.visits, self.pairs.items()
        total = sum(((pair.forward + pair.backward) * visits(*place, count) for place, pair in pairs), Seconds())
        again = self.config.dropped_share * sum(pair.forward.total for pair in self.pairs.values())
        total += Seconds(recompute=again * count)
        total *= 1 / self.config.parallel.pp
        unscaled = self._unscaled(ended)
        causes = {
            **vars(total), "dp": total.dp + without_pp - without_dp, "pp": ended - without_pp,
            "bubble": without_dp - total.total, "optimizer": self.slowest_update, "other": fixed,
            "cores": unscaled - ended - self.slowest_update - fixed, "scale": self.seconds(ended) - unscaled,
        }  # fmt: skip
        return {cause: 0.0 if -1e-9 * unscaled < value < 0 else value for cause, value in causes.items()}  # rounding


def scale(world: int, stack: Stack) -> float:
    """Return the factor of step time for large jobs, which grows with every doubling beyond `LARGE_JOB` devices."""
    return 1 + stack.attained.scale_loss * max(0.0, math.log2(world / LARGE_JOB))
