"""All checks of a node, and the sets of checks that run before a node joins a job and after a fault.

A card's target is a function (arguments) -> CheckResult (`operate.health.checks.result`): of a host or its paths in
`operate.health.checks`, of devices and groups of ranks, with torch, in `bench.checks`. Facts:

- `unit`: of the value, SI units without a prefix
- `better`: "higher" values, "same" values or "digest" on all nodes, or "zero"
- `runs_on`: "host", one process without torch; "device", one process per local device at the same time; "group", one
  process per rank of a group of ranks, on this node alone if the arguments name no group
- `min_ranks`: ranks without which a check of a group says nothing
- `noise`: spread of the values of healthy nodes, relative to their median; `floor`: in `unit`, differences below count
  as equal
"""

from __future__ import annotations

from typing import Any

from megascale.core.files import exists
from megascale.core.registry import Card, Registry


def _card(name: str, help_line: str, target: str, **facts: Any) -> Card:
    defaults = {"better": "higher", "runs_on": "host", "noise": 0.05, "floor": 0.0, "min_ranks": 1}
    return Card(name, help_line, target, defaults | facts)


CHECKS = Registry(
    "check",
    "megascale.checks",
    [
        _card(
            "limits", "limits of the operating system: open files, memory maps, processes, shared memory",
            "megascale.operate.health.checks.host:check_limits", unit="limits too low", better="zero",
        ),
        _card(
            "memory", "bandwidth of copies in host memory, compared with their source",
            "megascale.operate.health.checks.host:check_memory", unit="byte/s", noise=0.08,
        ),
        _card(
            "disk", "write, fsync and read back a file in `folder`, and compare its digest",
            "megascale.operate.health.checks.host:check_disk", unit="byte/s", noise=0.15,
        ),
        _card(
            "loopback", "bandwidth of TCP on the loopback interface",
            "megascale.operate.health.checks.host:check_loopback", unit="byte/s", noise=0.08,
        ),
        _card(
            "reach", "connections to the endpoints of all other nodes, with the job's secret",
            "megascale.operate.health.checks.paths:check_reach", unit="nodes not reached", better="zero",
        ),
        _card(
            "clock", "offset of the clock from a reference node's",
            "megascale.operate.health.checks.paths:check_clock", unit="s", better="same", floor=0.1,
        ),
        _card(
            "link", "bandwidth of TCP to other nodes, in both directions",
            "megascale.operate.health.checks.paths:check_link", unit="byte/s", noise=0.1,
        ),
        _card(
            "gemm", "GEMM rate of the device",
            "megascale.bench.checks.device:check_gemm", unit="FLOP/s", runs_on="device", noise=0.03,
        ),
        _card(
            "known_gemm", "GEMMs of integers, whose result is known to the bit",
            "megascale.bench.checks.device:check_known_gemm", unit="wrong elements", runs_on="device", better="zero",
        ),
        _card(
            "device_copy", "bandwidth between a GPU and the memory of the host",
            "megascale.bench.checks.device:check_device_copy", unit="byte/s", runs_on="device", noise=0.03,
        ),
        _card(
            "tiny_step", "training steps of a tiny model, whose weights are equal to the bit on every healthy node",
            "megascale.bench.checks.tiny_step:check_tiny_step", unit="", runs_on="group", better="digest",
        ),
        _card(
            "all_to_all",
            "bandwidth of an all-to-all among the ranks of a group, and its result",
            "megascale.bench.checks.group_bandwidth:check_all_to_all",
            unit="byte/s", runs_on="group", noise=0.05, min_ranks=2,
        ),
        _card(
            "all_reduce",
            "bus bandwidth of an all-reduce among the ranks of a group, and its result",
            "megascale.bench.checks.group_bandwidth:check_all_reduce",
            unit="byte/s", runs_on="group", noise=0.05, min_ranks=2,
        ),
    ],
)  # fmt: skip

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")  # devices of the drivers of NVIDIA's and AMD's GPUs

_HOST = ("limits", "memory", "disk", "loopback")
_DEVICE = ("known_gemm", "gemm", "device_copy")

CHECK_SETS = {
    "join": (*_HOST, *(_DEVICE if any(exists(name, optional=True) for name in GPU_FILES) else ())),
    "quick": (*_HOST, *_DEVICE),
    "full": (*_HOST, *_DEVICE, "tiny_step", "all_to_all"),
}
"""Checks of a node alone: "join" before a node joins a job, of devices only if these are GPUs; "quick" takes seconds,
"full" at most FULL_S.
"""

FULL_S = 60.0  # longest time of the set "full", in seconds on each node
