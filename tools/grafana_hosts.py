"""The dashboard of a job's hosts."""

from __future__ import annotations

from grafana_panels import NODE, Board, Panel, rate


def _host(title: str, unit: str, expression: str, legend: str = "{{node}}") -> Panel:
    return Panel(title, unit, ((expression, legend),))


def _gauge(title: str, unit: str, metric: str, legend: str = "{{node}}") -> Panel:
    return _host(title, unit, f"megascale_{metric}{{{NODE}}}", legend)


_GPU = "{{node}} GPU {{gpu}}"
_PORT = "{{node}} {{device}}/{{port}}"

HOSTS = Board(
    "megascale-hosts",
    "megascale: hosts",
    (
        (
            "Processors and memory",
            (
                _gauge("Processors in use", "percentunit", "host_cpu_utilization_ratio"),
                _gauge("Load", "none", "host_load1"),
                _host(
                    "Memory available",
                    "percentunit",
                    f"megascale_host_memory_available_bytes{{{NODE}}} / megascale_host_memory_size_bytes{{{NODE}}}",
                ),
                _host("Swapped in", "Bps", rate("host_swapped_in_bytes", NODE)),
                _gauge("Killed because memory ran out", "none", "host_oom_kills_total"),
            ),
        ),
        (
            "GPUs",
            (
                _gauge("Utilization", "percentunit", "gpu_utilization_ratio", _GPU),
                _gauge("Power", "watt", "gpu_power_watts", _GPU),
                _gauge("Clock", "hertz", "gpu_sm_clock_hertz", _GPU),
                _gauge("Temperature", "celsius", "gpu_temperature_celsius", _GPU),
                _gauge("Memory in use", "bytes", "gpu_memory_used_bytes", _GPU),
                _gauge("PCIe lanes", "none", "gpu_pcie_lanes", _GPU),
                _gauge("Memory errors not corrected", "none", "gpu_ecc_uncorrected_errors_total", _GPU),
                _gauge("Xid errors", "none", "gpu_xid_errors_total", _GPU),
            ),
        ),
        (
            "Network",
            (
                _host("Sent", "Bps", rate("host_network_sent_bytes", NODE)),
                _host("Received", "Bps", rate("host_network_received_bytes", NODE)),
                _host("Errors", "pps", rate("host_network_errors", NODE)),
                _host("Drops", "pps", rate("host_network_drops", NODE)),
                _host("Pause frames", "pps", rate("host_network_pause_frames", NODE)),
                _host("InfiniBand sent", "Bps", rate("infiniband_transmitted_bytes", NODE), _PORT),
                _host("InfiniBand received", "Bps", rate("infiniband_received_bytes", NODE), _PORT),
                _host("InfiniBand: waits to send", "none", rate("infiniband_transmit_wait", NODE), _PORT),
                _gauge("InfiniBand: links lost", "none", "infiniband_link_downed_total", _PORT),
            ),
        ),
        (
            "Disks and clock",
            (
                _host("Read", "Bps", rate("host_disk_read_bytes", NODE)),
                _host("Written", "Bps", rate("host_disk_written_bytes", NODE)),
                _host(
                    "Free space",
                    "percentunit",
                    f"megascale_host_filesystem_free_bytes{{{NODE}}} / megascale_host_filesystem_size_bytes{{{NODE}}}",
                    "{{node}} {{filesystem}}",
                ),
                _gauge("Offset of the clock", "s", "host_clock_offset_seconds"),
            ),
        ),
    ),
    nodes=True,
)
