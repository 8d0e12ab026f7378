"""A synthetic fleet: metrics of the hosts of a job, with injected faults of Minder's kinds, and what healthy hosts do.

Hosts differ a little for good, their values are noisy, samples are lost, clocks of samples are not equal, checkpoints
stop all GPUs together, and healthy hosts are disturbed for up to two and a half minutes as by a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megascale.operate.diagnose.slow.host_series import WATCHED, HostTable
from megascale.operate.store.host_families import split_device

SAMPLE_S, MINUTES = 5.0, 15
GB, MB = 1e9, 1e6
START_NS = 1_700_000_000 * 10**9

Random = np.random.Generator
Shape = Callable[[NDArray[np.float64], Random], NDArray[np.float64]]


@dataclass(frozen=True)
class Usual:
    """A metric of a healthy host: level, standard deviations over hosts and over samples, and what a checkpoint makes
    of it, as a factor.
    """

    level: float
    hosts: float
    noise: float
    checkpoint: float = 1.0
    least: float = 0.0
    most: float = np.inf


USUAL = {
    "cpu.percent": Usual(18, 2, 3, 1.6, most=100),
    "gpu.percent": Usual(96, 0.7, 2, 0.3, most=100),
    "gpu.power_w": Usual(600, 12, 15, 0.4),
    "gpu.clock_mhz": Usual(1900, 20, 10),
    "gpu.temperature": Usual(62, 3, 0.7, 0.9),
    "gpu.memory.used": Usual(60 * GB, 0.3 * GB, 0.05 * GB),
    "infiniband.port_xmit_data": Usual(4 * GB, 0.1 * GB, 0.4 * GB, 0.3),
    "infiniband.port_rcv_data": Usual(4 * GB, 0.1 * GB, 0.4 * GB, 0.3),
    "network.pause": Usual(30, 10, 25),
    "network.sent": Usual(3 * MB, 0.5 * MB, 1 * MB),
    "network.received": Usual(3 * MB, 0.5 * MB, 1 * MB),
    "memory.available": Usual(800 * GB, 12 * GB, 1 * GB, 0.9),
    "disk.written": Usual(2 * MB, 0.3 * MB, 1 * MB, 300.0),
    "disk.read": Usual(20 * MB, 2 * MB, 6 * MB),
}
DEVICES = {"gpu": [f"gpu{index}" for index in range(4)], "infiniband": ["mlx5_0.1", "mlx5_1.1"]}


@dataclass(frozen=True)
class Effect:
    """The effect of a fault on a metric at full strength: `times` its value, plus `add`, on one device or on all.
    `weak`: share of this strength of the weakest fault.
    """

    metric: str
    times: float = 1.0
    add: float = 0.0
    all_devices: bool = False
    weak: float = 0.25


KINDS: dict[str, tuple[Effect, ...]] = {
    "gpu down": (Effect("gpu.percent", 0.0), Effect("gpu.power_w", 0.2), Effect("gpu.clock_mhz", 0.7)),
    "pcie downgrade": (
        Effect("network.pause", add=3000, weak=0.05),
        Effect("infiniband.port_xmit_data", 0.7),
    ),
    "nic drop": (Effect("infiniband.port_xmit_data", 0.0), Effect("infiniband.port_rcv_data", 0.0)),
    "cpu contention": (Effect("cpu.percent", add=75),),
    "disk": (Effect("disk.read", 8.0), Effect("disk.written", add=80 * MB)),
    "memory": (Effect("memory.available", 0.1, weak=0.15),),
    "gpu power": (Effect("gpu.power_w", 0.4, all_devices=True), Effect("gpu.clock_mhz", 0.7, all_devices=True)),
    "gpu clock": (Effect("gpu.clock_mhz", 0.5), Effect("gpu.temperature", add=24)),
}


def _flapping(s: NDArray[np.float64], random: Random) -> NDArray[np.float64]:
    return (s % 40 < 24).astype(float)


SHAPES: dict[str, Shape] = {
    "step": lambda s, random: np.ones_like(s),
    "ramp": lambda s, random: np.minimum(s / 120, 1),
    "slow ramp": lambda s, random: np.minimum(s / 300, 1),
    "saturating": lambda s, random: 1 - np.exp(-s / 40),
    "oscillating": lambda s, random: 0.7 + 0.3 * np.sin(s / 12),
    "flapping": _flapping,
    "noisy": lambda s, random: random.uniform(0.4, 1, s.shape),
    "stairs": lambda s, random: np.minimum(np.floor(s / 60) / 4 + 0.25, 1),
    "fading": lambda s, random: 0.5 + 0.5 * np.exp(-s / 120),
    "pulse, then step": lambda s, random: np.where((s > 20) & (s < 60), 0, 1.0),
}
"""Strength of a fault by seconds since its beginning."""


CHANGES = ("", "slower", "stop", "restart", "hotter", "stages")
"""What all hosts of a healthy fleet have in common; the last needs several hosts for each pipeline stage."""


@dataclass(frozen=True)
class Fleet:
    """A table of a fleet's metrics, and the faulty host; None if all are healthy."""

    table: HostTable
    culprit: str | None
    what: str


def fleets(seed: int, sizes: Sequence[int] = (4, 8, 16, 32, 64, 128)) -> Iterator[Fleet]:
    """Yield fleets: one with each kind and shape of a fault, and as many healthy ones. `sizes`: numbers of hosts."""
    random = np.random.default_rng(seed)
    for kind in KINDS:
        for shape in SHAPES:
            hosts = int(random.choice(sizes))
            yield make_fleet(random, hosts, kind, shape)
            changes = CHANGES if hosts > 8 else CHANGES[:-1]
            yield make_fleet(random, hosts, change=str(random.choice(changes)))


def make_fleet(
    random: Random, hosts: int, kind: str = "", shape: str = "step", change: str = "", disturbances: int | None = None
) -> Fleet:
    """Return a fleet with a fault of a `kind`, and with a `change` that all hosts have in common. `disturbances`: of
    healthy hosts, by default one for eight hosts.
    """
    times = np.arange(0, MINUTES * 60, SAMPLE_S)[:, None] + random.uniform(0, SAMPLE_S, hosts)
    times += random.normal(0, 0.2, times.shape)
    checkpoints = (times + random.uniform(0, 200) + random.normal(0, 2, hosts)) % 200 < 25
    values = {metric: _usual(random, metric, times, checkpoints) for metric in USUAL}
    for _ in range(max(2, hosts // 8) if disturbances is None else disturbances):
        _disturb(random, values, times)
    _change(random, values, times, change)
    culprit = int(random.integers(hosts)) if kind else None
    if culprit is not None:
        _inject(random, values, times, culprit, kind, SHAPES[shape])
    for metric, usual in USUAL.items():
        np.clip(values[metric], usual.least, usual.most, out=values[metric])
    what = f"{kind}, {shape}, {hosts} hosts" if kind else f"healthy, {change or 'no change'}, {hosts} hosts"
    return Fleet(_table(random, values, times), None if culprit is None else f"node{culprit}", what)


def _devices(metric: str) -> list[str]:
    return DEVICES.get(metric.partition(".")[0], [""])


def _usual(random: Random, metric: str, times: NDArray, checkpoints: NDArray) -> NDArray[np.float64]:
    """Return [time, host, device] values of healthy hosts."""
    usual, devices = USUAL[metric], len(_devices(metric))
    level = usual.level + random.normal(0, usual.hosts, (times.shape[1], devices))
    noise = random.normal(0, usual.noise, (*times.shape, devices))
    noise[1:] += 0.5 * noise[:-1]
    return level * np.where(checkpoints, usual.checkpoint, 1.0)[..., None] + noise


def _apply(values: dict[str, NDArray], effect: Effect, host: int, device: int, strength: NDArray) -> None:
    part = values[effect.metric][:, host]
    chosen = slice(None) if effect.all_devices else device % part.shape[1]
    full = part[:, chosen] * (effect.times - 1) + effect.add
    part[:, chosen] += full * (strength[:, None] if effect.all_devices else strength)


def _inject(random: Random, values: dict[str, NDArray], times: NDArray, host: int, kind: str, shape: Shape) -> None:
    """Begin a fault in the first half of the time. It also slows the whole job a little."""
    begin, size = random.uniform(120, 420), random.uniform(0, 1)
    since = times[:, host] - begin
    strength = np.where(since >= 0, shape(np.maximum(since, 0), random), 0)
    device = int(random.integers(4))
    for effect in KINDS[kind]:
        _apply(values, effect, host, device, strength * (effect.weak + size * (1 - effect.weak)))
    slower = np.where(times > begin + random.uniform(5, 20), 0.85, 1.0)[..., None]
    for metric in ("infiniband.port_xmit_data", "infiniband.port_rcv_data", "gpu.power_w"):
        values[metric] *= slower


def _disturb(random: Random, values: dict[str, NDArray], times: NDArray) -> None:
    """Disturb a healthy host as a fault does, for at most two and a half minutes."""
    kind, host = str(random.choice(list(KINDS))), int(random.integers(times.shape[1]))
    since = times[:, host] - random.uniform(0, MINUTES * 60)
    strength = np.where((since > 0) & (since < random.uniform(10, 150)), random.uniform(0.2, 1), 0.0)
    for effect in KINDS[kind]:
        _apply(values, effect, host, int(random.integers(4)), strength)


def _change(random: Random, values: dict[str, NDArray], times: NDArray, change: str) -> None:
    """Change all hosts, each within seconds of the others."""
    after = (times > random.uniform(120, 600) + random.normal(0, 3, times.shape[1]))[..., None]
    if change == "slower":
        for metric in ("gpu.percent", "gpu.power_w", "infiniband.port_xmit_data", "infiniband.port_rcv_data"):
            values[metric] *= np.where(after, 0.5, 1)
    elif change == "stop":
        for metric in ("gpu.power_w", "infiniband.port_xmit_data", "infiniband.port_rcv_data", "network.sent"):
            values[metric] *= np.where(after, 0.1, 1)
    elif change == "restart":
        within = after & ~np.roll(after, round(90 / SAMPLE_S), axis=0)
        for metric, usual in USUAL.items():
            if metric.startswith(("gpu", "infiniband", "disk")):
                values[metric] = np.where(within, random.uniform(0, 0.1, within.shape) * usual.level, values[metric])
    elif change == "hotter":
        values["gpu.temperature"] += 15 * after
        values["gpu.clock_mhz"] -= 200 * after
    elif change == "stages":  # the hosts of the last of four pipeline stages do something else, all the time
        last = slice(-(times.shape[1] // 4), None)
        values["gpu.memory.used"][:, last] -= 12 * GB
        values["gpu.power_w"][:, last] *= 0.85
        values["cpu.percent"][:, last] += 15


def _table(random: Random, values: dict[str, NDArray], times: NDArray) -> HostTable:
    """Return the table: counters as totals, without lost samples; in one fleet of five a host is missing for good."""
    count, hosts = times.shape
    kept = random.random(times.shape) > 0.02
    for host in range(hosts):
        if random.random() < 0.1:  # a gap
            begin = int(random.integers(count))
            kept[begin : begin + int(random.integers(2, 20)), host] = False
    if random.random() < 0.2:
        kept[int(random.integers(count)) if random.random() < 0.5 else 0 :, int(random.integers(hosts))] = False
    names: list[str] = []
    metric, node, when, value = [], [], [], []
    stamps = START_NS + (times * 1e9).astype(np.int64)
    seconds = np.diff(times, axis=0, prepend=times[:1] - SAMPLE_S)
    for name, samples in values.items():
        for index, device in enumerate(_devices(name)):
            one = samples[:, :, index]
            one = np.cumsum(one * seconds, axis=0) if WATCHED[name].counter else one
            full = f"{device}.{name.removeprefix('gpu.')}" if device.startswith("gpu") else name
            full = f"infiniband.{device}.{name.removeprefix('infiniband.')}" if name.startswith("infiniband") else full
            assert split_device(full) == (name, device)
            metric.append(np.full(int(kept.sum()), len(names), np.int32))
            names.append(full)
            node.append(np.broadcast_to(np.arange(hosts, dtype=np.int32), times.shape)[kept])
            when.append(stamps[kept])
            value.append(one[kept])
    nodes = [f"node{host}" for host in range(hosts)]
    return HostTable(
        nodes, names, np.concatenate(node), np.concatenate(metric), np.concatenate(when), np.concatenate(value)
    )
