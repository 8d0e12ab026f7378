"""Metrics of a host by the names of `health.host_metrics`: their families in Prometheus' form, and in which of them
hosts of a job are compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megascale.operate.store.families import Families, Labels, MetricFamily


@dataclass(frozen=True)
class HostMetric:
    """A metric without its device, and its `family`. `counter`: samples are totals. `scale`: to the unit of the family.
    `floor`: a difference that means nothing where healthy hosts are alike, in the metric's unit, of a counter per
    second; 0 where they are not compared.
    """

    family: str
    help: str
    counter: bool = False
    scale: float = 1.0
    floor: float = 0.0


_PERCENT = 0.01
_WORD = 4.0  # InfiniBand's counters of data count words of four bytes

HOST_METRICS: Mapping[str, HostMetric] = {
    "cpu.percent": HostMetric("host_cpu_utilization_ratio", "share of the cores in use", scale=_PERCENT, floor=1.5),
    "cpu.load": HostMetric("host_load1", "processes that run or want to, mean of a minute"),
    "memory.total": HostMetric("host_memory_size_bytes", "memory of the host"),
    "memory.available": HostMetric("host_memory_available_bytes", "memory that processes can still get", floor=500e6),
    "memory.swapped_in": HostMetric("host_swapped_in_bytes", "bytes swapped in", counter=True, floor=1e6),
    "memory.oom_kills": HostMetric(
        "host_oom_kills", "processes killed by the kernel because memory ran out", counter=True
    ),
    "disk.read": HostMetric("host_disk_read_bytes", "bytes read from disks", counter=True, floor=1e6),
    "disk.written": HostMetric("host_disk_written_bytes", "bytes written to disks", counter=True, floor=1e6),
    "disk.free": HostMetric("host_filesystem_free_bytes", "free bytes: shm, or the run's folder"),
    "disk.size": HostMetric("host_filesystem_size_bytes", "bytes: shm, or the run's folder"),
    "network.sent": HostMetric("host_network_sent_bytes", "bytes sent", counter=True, floor=1e6),
    "network.received": HostMetric("host_network_received_bytes", "bytes received", counter=True, floor=1e6),
    "network.errors": HostMetric("host_network_errors", "packets with errors", counter=True, floor=1.0),
    "network.drops": HostMetric("host_network_drops", "packets dropped", counter=True, floor=1.0),
    "network.pause": HostMetric("host_network_pause_frames", "pause frames of flow control", counter=True, floor=10.0),
    "clock.offset_s": HostMetric("host_clock_offset_seconds", "offset of the clock from its reference"),
    "clock.error_s": HostMetric("host_clock_max_error_seconds", "largest error of the clock"),
    "clock.synchronized": HostMetric("host_clock_synchronized", "1 if the clock is synchronized"),
    "infiniband.port_xmit_data": HostMetric(
        "infiniband_transmitted_bytes", "bytes sent by the port", counter=True, scale=_WORD, floor=1e6
    ),
    "infiniband.port_rcv_data": HostMetric(
        "infiniband_received_bytes", "bytes received by the port", counter=True, scale=_WORD, floor=1e6
    ),
    "infiniband.port_xmit_wait": HostMetric(
        "infiniband_transmit_wait", "ticks in which the port could not send", counter=True, floor=1e6
    ),
    "infiniband.symbol_error": HostMetric("infiniband_symbol_errors", "symbol errors of the link", counter=True),
    "infiniband.link_downed": HostMetric("infiniband_link_downed", "losses of the link", counter=True),
    "infiniband.link_error_recovery": HostMetric("infiniband_link_recoveries", "recoveries of the link", counter=True),
    "infiniband.active": HostMetric("infiniband_link_up", "1 if the link is up"),
    "gpu.percent": HostMetric("gpu_utilization_ratio", "share of time in which kernels run", scale=_PERCENT, floor=1.5),
    "gpu.memory.used": HostMetric("gpu_memory_used_bytes", "memory in use", floor=100e6),
    "gpu.temperature": HostMetric("gpu_temperature_celsius", "temperature", floor=1.5),
    "gpu.power_w": HostMetric("gpu_power_watts", "power", floor=5.0),
    "gpu.clock_mhz": HostMetric("gpu_sm_clock_hertz", "clock of the multiprocessors", scale=1e6, floor=15.0),
    "gpu.throttle": HostMetric("gpu_throttle_reasons", "NVML's bits of reasons for a lower clock"),
    "gpu.pcie_width": HostMetric("gpu_pcie_lanes", "lanes of PCIe in use", floor=0.5),
    "gpu.ecc_uncorrected": HostMetric("gpu_ecc_uncorrected_errors", "memory errors not corrected", counter=True),
    "gpu.xid": HostMetric("gpu_xid_errors", "critical Xid errors since the start of the process", counter=True),
    "gpu.last_xid": HostMetric("gpu_last_xid", "number of the last critical Xid error"),
    "gpu.lost": HostMetric("gpu_lost", "1 if the driver does not reach the GPU"),
}
"""Metrics by name, without the device."""


def split_device(metric: str) -> tuple[str, str]:
    """Return the name without the device, and the device: ("gpu.percent", "gpu3"), ("infiniband.active", "mlx5_0.1"),
    ("disk.free", "shm"), ("cpu.percent", "").
    """
    if match := re.fullmatch(r"(gpu\d+)\.(.+)", metric):
        return f"gpu.{match[2]}", match[1]
    if match := re.fullmatch(r"(infiniband|disk)\.(.+)\.([^.]+)", metric):
        return f"{match[1]}.{match[3]}", match[2]
    return metric, ""


def host_families(metrics: Mapping[str, float], labels: Labels) -> list[MetricFamily]:
    """Return the families of a sample of a host. `labels`: of all series."""
    found = Families(labels)
    for metric, value in metrics.items():
        name, device = split_device(metric)
        if (known := HOST_METRICS.get(name)) is not None:
            place = {"disk": {"filesystem": device}, "gpu": {"gpu": device.removeprefix("gpu")}}
            place["infiniband"] = dict(zip(("device", "port"), device.rsplit(".", 1), strict=False))
            add = found.counter if known.counter else found.gauge
            add(known.family, known.help, value * known.scale, place[name.partition(".")[0]] if device else {})
    return list(found)
