"""Metrics of a host in Prometheus' form: each name of `health.host_metrics` with family, unit and labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from megascale.operate.store.families import Labels, MetricFamily

_PERCENT = 0.01
_WORD = 4.0  # InfiniBand's counters of data count words of four bytes


@dataclass(frozen=True)
class _Rule:
    """Metrics whose names match `pattern`; its named groups are labels. `scale`: to the unit of the family."""

    pattern: str
    family: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    scale: float = 1.0


_PORT = r"infiniband\.(?P<device>.+)\.(?P<port>[^.]+)\."
_GPU = r"gpu(?P<gpu>\d+)\."

_RULES = (
    _Rule(r"cpu\.percent", "host_cpu_utilization_ratio", "share of the cores in use", scale=_PERCENT),
    _Rule(r"cpu\.load", "host_load1", "processes that run or want to, mean of a minute"),
    _Rule(r"memory\.total", "host_memory_size_bytes", "memory of the host"),
    _Rule(r"memory\.available", "host_memory_available_bytes", "memory that processes can still get"),
    _Rule(r"memory\.swapped_in", "host_swapped_in_bytes", "bytes swapped in", "counter"),
    _Rule(r"memory\.oom_kills", "host_oom_kills", "processes killed by the kernel because memory ran out", "counter"),
    _Rule(r"disk\.read", "host_disk_read_bytes", "bytes read from disks", "counter"),
    _Rule(r"disk\.written", "host_disk_written_bytes", "bytes written to disks", "counter"),
    _Rule(r"disk\.(?P<filesystem>.+)\.free", "host_filesystem_free_bytes", "free bytes: shm, or the run's folder"),
    _Rule(r"disk\.(?P<filesystem>.+)\.size", "host_filesystem_size_bytes", "bytes: shm, or the run's folder"),
    _Rule(r"network\.sent", "host_network_sent_bytes", "bytes sent", "counter"),
    _Rule(r"network\.received", "host_network_received_bytes", "bytes received", "counter"),
    _Rule(r"network\.errors", "host_network_errors", "packets with errors", "counter"),
    _Rule(r"network\.drops", "host_network_drops", "packets dropped", "counter"),
    _Rule(r"network\.pause", "host_network_pause_frames", "pause frames of flow control", "counter"),
    _Rule(r"clock\.offset_s", "host_clock_offset_seconds", "offset of the clock from its reference"),
    _Rule(r"clock\.error_s", "host_clock_max_error_seconds", "largest error of the clock"),
    _Rule(r"clock\.synchronized", "host_clock_synchronized", "1 if the clock is synchronized"),
    _Rule(_PORT + "port_xmit_data", "infiniband_transmitted_bytes", "bytes sent by the port", "counter", _WORD),
    _Rule(_PORT + "port_rcv_data", "infiniband_received_bytes", "bytes received by the port", "counter", _WORD),
    _Rule(_PORT + "port_xmit_wait", "infiniband_transmit_wait", "ticks in which the port could not send", "counter"),
    _Rule(_PORT + "symbol_error", "infiniband_symbol_errors", "symbol errors of the link", "counter"),
    _Rule(_PORT + "link_downed", "infiniband_link_downed", "losses of the link", "counter"),
    _Rule(_PORT + "link_error_recovery", "infiniband_link_recoveries", "recoveries of the link", "counter"),
    _Rule(_PORT + "active", "infiniband_link_up", "1 if the link is up"),
    _Rule(_GPU + "percent", "gpu_utilization_ratio", "share of time in which kernels run", scale=_PERCENT),
    _Rule(_GPU + r"memory\.used", "gpu_memory_used_bytes", "memory in use"),
    _Rule(_GPU + "temperature", "gpu_temperature_celsius", "temperature"),
    _Rule(_GPU + "power_w", "gpu_power_watts", "power"),
    _Rule(_GPU + "clock_mhz", "gpu_sm_clock_hertz", "clock of the multiprocessors", scale=1e6),
    _Rule(_GPU + "throttle", "gpu_throttle_reasons", "NVML's bits of reasons for a lower clock"),
    _Rule(_GPU + "pcie_width", "gpu_pcie_lanes", "lanes of PCIe in use"),
    _Rule(_GPU + "ecc_uncorrected", "gpu_ecc_uncorrected_errors", "memory errors not corrected", "counter"),
    _Rule(_GPU + "xid", "gpu_xid_errors", "critical Xid errors since the start of the process", "counter"),
    _Rule(_GPU + "last_xid", "gpu_last_xid", "number of the last critical Xid error"),
    _Rule(_GPU + "lost", "gpu_lost", "1 if the driver does not reach the GPU"),
)


def host_families(metrics: Mapping[str, float], labels: Labels) -> Iterable[MetricFamily]:
    """Return the families of a sample of a host. `labels`: of all series."""
    families = {rule.family: MetricFamily(rule.family, rule.kind, rule.help) for rule in _RULES}
    for name, value in metrics.items():
        for rule in _RULES:
            if match := re.fullmatch(rule.pattern, name):
                families[rule.family].add(value * rule.scale, labels | match.groupdict())
                break
    return [family for family in families.values() if family.samples]
