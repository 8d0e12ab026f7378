"""Failures of long jobs as others have counted them: causes, and what each looks like to the driver of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Symptom = Literal["killed", "hardware", "node", "network", "hang", "software", "storage", "memory", "divergence"]
"""Symptoms, as the driver sees them: a rank killed; a rank that failed with a hardware error in its output; a lost
node; ranks that lost each other; a hang; an error of software, of storage, or of memory; a loss that is not
finite.
"""


@dataclass(frozen=True)
class Cause:
    """A cause of interruptions. `count`: as published; `at_node`: a node is at fault; `persists`: share of cases in
    which the node fails again until it is replaced.
    """

    name: str
    count: int
    symptom: Symptom
    at_node: bool = True
    persists: float = 0.0


@dataclass(frozen=True)
class FailureMix:
    """Causes with their counts. `device_hours`: mean hours between failures of a device; `source`: of the counts."""

    name: str
    causes: tuple[Cause, ...]
    device_hours: float
    source: str

    @property
    def node_share(self) -> float:
        """The share of failures with a node at fault."""
        return sum(cause.count for cause in self.causes if cause.at_node) / sum(cause.count for cause in self.causes)


LLAMA3 = FailureMix(
    "Llama 3",
    (
        Cause("faulty GPU", 148, "hardware", persists=0.9),
        Cause("GPU HBM3 memory", 72, "hardware", persists=0.7),
        Cause("software bug", 54, "software", at_node=False),
        Cause("network switch or cable", 35, "network", persists=0.5),
        Cause("host maintenance", 32, "node", persists=1.0),
        Cause("GPU SRAM memory", 19, "hardware", persists=0.7),
        Cause("GPU system processor", 17, "hardware", persists=0.5),
        Cause("NIC", 7, "network", persists=0.8),
        Cause("NCCL watchdog timeouts", 7, "hang", persists=0.3),
        Cause("silent data corruption", 6, "divergence", persists=1.0),
        Cause("GPU thermal interface and sensor", 6, "hardware", persists=0.8),
        Cause("SSD", 3, "storage", persists=0.8),
        Cause("power supply", 3, "node", persists=1.0),
        Cause("server chassis", 2, "node", persists=1.0),
        Cause("IO expansion board", 2, "node", persists=1.0),
        Cause("dependency", 2, "software", at_node=False),
        Cause("CPU", 2, "killed", persists=0.8),
        Cause("system memory", 2, "killed", persists=0.8),
    ),
    54 * 24 * 16_384 / 419,
    "419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, table 5)",
)

BYTEROBUST = FailureMix(
    "ByteRobust",
    (
        Cause("CUDA error", 19_968, "hardware", persists=0.3),
        Cause("CPU overload", 6_095, "hang", persists=0.3),
        Cause("CPU out of memory", 5_567, "memory", at_node=False),
        Cause("job hang", 5_506, "hang", persists=0.5),
        Cause("insufficient disk space", 2_755, "storage", at_node=False),
        Cause("InfiniBand error", 1_599, "network", persists=0.5),
        Cause("filesystem mount", 1_176, "storage", persists=0.5),
        Cause("HDFS error", 1_104, "storage", at_node=False),
        Cause("container error", 781, "killed", persists=0.3),
        Cause("MFU decline", 442, "hang", persists=0.8),
        Cause("OS kernel panic", 203, "node", persists=0.3),
        Cause("GPU memory error", 188, "hardware", persists=0.8),
        Cause("NaN value", 148, "divergence", persists=0.5),
        Cause("external service error", 128, "software", at_node=False),
        Cause("GPU unavailable", 76, "hardware", persists=1.0),
        Cause("disk fault", 47, "hardware", persists=1.0),
    ),
    54 * 24 * 16_384 / 419,
    "incidents of 778,135 jobs in three months without changes of code (arXiv 2509.16293, table 1), at Llama 3's rate",
)

MIXES = {"llama3": LLAMA3, "byterobust": BYTEROBUST}
