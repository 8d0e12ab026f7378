"""Time of an update of state in host memory, and the best stride (`optim.host_updates`; Maurya et al. 2024,
arXiv:2410.21316, section 4.2, with the wire times of both kinds of sub-groups).

Of n sub-groups m = n div k are updated on the device. Processor, link and device work at the same time, and the link in
both directions, each of which carries a gradient or master weights for a sub-group on the host, and master weights with
state for one on the device:

    T(m) = max((n - m) host, (n - m) gradient + m state, m device)
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config.run import RunConfig
from megascale.layout.buckets import sub_groups
from megascale.plan.account.optimizer_state import StageOptimizer
from megascale.plan.account.state_bytes import state_shards
from megascale.plan.simulate.profiles import Hardware


@dataclass(frozen=True)
class HostUpdateTime:
    """Seconds of one of `count` sub-groups: of its update on the `host` and on the `device`, and of the link, each way,
    for a `gradient` and for the `state`.
    """

    count: int
    host: float
    device: float
    gradient: float
    state: float

    def seconds(self, stride: int | None) -> float:
        """Time the update with every `stride`-th sub-group on the device; 0: none, None: the best."""
        stride = self.best_stride if stride is None else stride
        m = self.count // stride if stride else 0
        rest = self.count - m
        return max(rest * self.host, rest * self.gradient + m * self.state, m * self.device)

    @property
    def best_stride(self) -> int:
        """The smallest stride of the shortest update."""
        return min(range(self.count + 1), key=self.seconds)


def host_update(config: RunConfig, hardware: Hardware) -> HostUpdateTime | None:
    """Return the times on the rank with most state, of a resolved configuration; None without `optimizer.offload`, or
    on hardware whose profile does not state the rates.
    """
    link, memory, attained = hardware.device.host_bandwidth, hardware.node.memory_bandwidth, hardware.attained
    if config.optimizer.offload == "none" or link is None or memory is None:
        return None
    stage = max(range(config.parallel.pp), key=lambda stage: sum(state_shards(config, stage)))
    shards, state_bytes = state_shards(config, stage), StageOptimizer(config, stage).state_bytes(config.parallel.zero)
    count = sum(len(sub_groups(0, shard)) for shard in shards)
    rounded, gradient = (size * sum(shards) / count for size in config.train.element_bytes)
    state = gradient + state_bytes / count
    on_host, on_device = memory * attained.memory / hardware.node.devices, hardware.device.bandwidth * attained.memory
    return HostUpdateTime(
        count,
        host=2 * (state + gradient) / on_host,  # state and gradient are read and written
        device=(2 * state + gradient + rounded) / on_device,
        gradient=gradient / (link * attained.link),
        state=state / (link * attained.link),
    )
