"""The cases of `python tools/lab faults`: a fault, and what must come of it.

The numbers in `reference` are those of the cases in docs/results/faults.md. A job of the benchmark has two ranks a
node in tp 2 x pp 2 x dp 2 (4 nodes): rank r is on node r // 2, and tp peers share a node.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megascale.core.errors import Exit

RANKS_PER_NODE = 2


@dataclass(frozen=True)
class Expected:
    """The expected outcome of a fault. `classes`: classes of the first incident, any of them, empty for no incident;
    `ranks`, `nodes`: its culprit, None where none can be named; `actions`: any of them; `status`: of the job.
    `unseen`: there may be no incident.
    """

    classes: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    nodes: tuple[str, ...] | None = None
    actions: tuple[str, ...] = ("restart",)
    status: int = Exit.OK
    unseen: bool = False


@dataclass(frozen=True)
class FaultCase:
    """A case. `inject`: `fault.inject` of the job; `settings`: further overrides; `spares`: of the job. `most_lost`:
    most steps that may be computed twice. `same_curve`: the loss of every step equals the undisturbed run's. `says`:
    words of the job's output. `testbed`: the nodes are hosts of a testbed, joined by links. `disk_bytes`: size of a
    file system that the checkpoints have to themselves.
    """

    name: str
    reference: str
    title: str
    inject: str
    expected: Expected
    spares: int = 0
    settings: tuple[str, ...] = field(default=())
    most_lost: int = 1
    same_curve: bool = True
    says: str = ""
    testbed: bool = False
    disk_bytes: int = 0


def rank_case(
    name: str, reference: str, title: str, fault: str, rank: int, *classes: str, step: int = 6, lost: int = 1
) -> FaultCase:
    """Return a case of a fault of one rank, which must be named, and restarted in place."""
    kind, _, options = fault.partition(" ")
    inject = f"{kind} rank={rank} step={step} {options}".strip()
    return FaultCase(name, reference, title, inject, Expected(classes, ranks=(rank,)), most_lost=lost)


def node_case(name: str, reference: str, title: str, fault: str, expected: Expected, spares: int = 0) -> FaultCase:
    """Return a case of a fault of node 2."""
    return FaultCase(name, reference, title, f"{fault} node=2 step=6", expected, spares)


def link_case(name: str, reference: str, title: str, inject: str, expected: Expected, spares: int = 0) -> FaultCase:
    """Return a case of a fault of a link."""
    return FaultCase(name, reference, title, inject, expected, spares, testbed=True)


STOP = Expected(("divergence",), None, actions=("stop",), status=Exit.DO_NOT_REQUEUE)
LOST = Expected(("node",), nodes=("node2",), actions=("replace",))
REVIVED = Expected(("node",), nodes=("node2",), actions=("restart", "replace"))
FLAP = Expected(("network",), actions=("wait",), unseen=True)
PAIR = Expected(("network",), nodes=("node1", "node3"), actions=("wait", "restart", "replace"))
FOUR_REPLICAS = ("parallel.pp=1", "parallel.dp=4", "parallel.zero=0", "train.check_replicas_every=1")
KEEP_CHECKPOINTS = ("checkpoint.every=4", "checkpoint.keep=2")

CASES = (
    rank_case("killed in forward", "A1", "SIGKILL of a rank in forward", "kill phase=forward", 2, "process"),
    rank_case("killed in backward", "A1", "SIGKILL of a rank in backward", "kill phase=backward", 5, "process"),
    rank_case("killed in optimizer", "A1", "SIGKILL of a rank in the optimizer", "kill phase=optimizer", 0, "process"),
    rank_case("killed in data", "A1", "SIGKILL of a rank in the data loader", "kill phase=data", 7, "process"),
    rank_case("killed in tp", "A2", "SIGKILL of a rank in a tensor-parallel collective", "kill phase=tp", 3, "process"),
    rank_case(
        "killed in reduction", "A2", "SIGKILL of a rank in a reduction", "kill phase=grad_reduce", 4, "process"
    ),
    rank_case("killed in totals", "A2", "SIGKILL in the step's all-reduce", "kill phase=totals", 1, "process"),
    rank_case("killed in receive", "A2", "SIGKILL of a rank that receives", "kill phase=receive", 6, "process"),
    rank_case("killed in send", "A2", "SIGKILL of a rank that sends", "kill phase=send", 2, "process"),
    rank_case("stopped in forward", "A3", "SIGSTOP of a rank in forward", "stop phase=forward", 3, "hang"),
    rank_case("stopped in backward", "A3", "SIGSTOP of a rank in backward", "stop phase=backward", 6, "hang"),
    rank_case("stopped in receive", "A3", "SIGSTOP of a rank that receives", "stop phase=receive", 4, "hang"),
    rank_case("stopped in totals", "A3", "SIGSTOP in the step's all-reduce", "stop phase=totals", 1, "hang"),
    rank_case("stuck in forward", "A4", "a rank sleeps without end in forward", "hang phase=forward", 5, "hang"),
    rank_case("stuck loader", "E4", "a rank hangs in the data loader", "hang phase=data", 0, "hang", "data"),
    rank_case("stuck reduction", "A4", "a rank never enters a reduction", "hang phase=grad_reduce", 7, "hang"),
    rank_case("GIL held", "A4", "a rank holds Python's lock", "hold_gil phase=forward", 2, "hang"),
    rank_case("GIL held in backward", "A4", "a rank holds Python's lock", "hold_gil phase=backward", 4, "hang"),
    rank_case("skipped reduction", "C6", "a rank leaves out a gradient reduction", "skip_collective", 3, "hang"),
    rank_case(
        "skipped tp", "C6", "a rank leaves out a tensor-parallel collective", "skip_collective phase=tp", 6, "hang",
        "process", "software",
    ),
    FaultCase(
        "lost message", "B5", "a message to the next stage is lost: both ends are named", "lose_message rank=1 step=6",
        Expected(("network",), (1, 5), actions=("wait", "restart")),
    ),
    rank_case("slow storage", "D7", "a read of data does not return", "slow_storage", 4, "hang", "storage", "data"),
    rank_case("raises", "A7", "a rank raises an error", "raise phase=forward", 5, "software"),
    rank_case("raises in backward", "A7", "a rank raises an error", "raise phase=backward", 0, "software"),
    rank_case("exits", "A5", "a rank ends without a word, status 7", "exit status=7", 3, "process"),
    rank_case("exits with 0", "A5", "a library ends a rank, status 0", "exit status=0", 6, "process"),
    node_case("agent killed", "A8", "SIGKILL of an agent, whose ranks die with it", "kill_agent", REVIVED),
    node_case("node lost, spare", "A10", "a node's processes are gone; a spare", "lose_node", LOST, spares=1),
    node_case("node lost", "A11", "a node's processes are gone; no spare", "lose_node", REVIVED),
    node_case("node stopped", "A10", "a node's processes are stopped; a spare", "stop_node", LOST, spares=1),
    FaultCase(
        "store lost", "B8", "SIGKILL of rank 0's agent, and of the job's store with it", "kill_agent node=0 step=6",
        Expected(("node",), nodes=("node0",), actions=("restart", "replace")),
    ),
    FaultCase("driver killed", "A14", "SIGKILL of the driver: training goes on", "kill_driver step=6", Expected()),
    FaultCase(
        "driver and rank killed", "A14", "SIGKILL of driver and rank in one step",
        "kill_driver step=6; kill rank=2 step=6",
        Expected(("process",), (2,)),
    ),
    FaultCase(
        "same step", "A12", "a rank dies in the same step, every time", "kill rank=1 step=6 times=9",
        Expected(("process",), (1,), status=Exit.DO_NOT_REQUEUE), settings=("fault.restarts_in_place=5",),
        same_curve=False,
    ),
    FaultCase(
        "killed in recovery", "A13", "a second rank dies while the job loads",
        "kill rank=2 step=6; kill rank=5 phase=load",
        Expected(("process",)),
    ),
    FaultCase(
        "two ranks killed", "A1", "two ranks of two nodes die in one step", "kill rank=2 step=6; kill rank=5 step=6",
        Expected(("process",)),
    ),
    FaultCase(
        "NaN", "C4", "a weight becomes NaN: never a success, no checkpoint", "nan rank=2 step=6", STOP,
        settings=KEEP_CHECKPOINTS, same_curve=False,
    ),
    FaultCase(
        "weight flipped", "C2", "a bit of a weight flips on one of four replicas", "flip_weight rank=3 step=6 bit=20",
        replace(STOP, ranks=(3,)), settings=FOUR_REPLICAS, same_curve=False,
    ),
    FaultCase(
        "gradient flipped", "C2", "a bit of a reduced gradient flips on one of four replicas",
        "flip_gradient rank=6 step=6 bit=20",
        replace(STOP, ranks=(6,)), settings=FOUR_REPLICAS, same_curve=False,
    ),
    FaultCase(
        "writer killed", "D1", "SIGKILL of a checkpoint writer: training goes on", "kill rank=3 step=8 phase=write",
        Expected(), settings=KEEP_CHECKPOINTS,
    ),
    FaultCase(
        "killed in snapshot", "D1", "SIGKILL of a rank while it copies its state", "kill rank=3 step=8 phase=snapshot",
        Expected(("process",), (3,)), settings=KEEP_CHECKPOINTS,
    ),
    FaultCase(
        "killed before the commit", "D2", "SIGKILL of rank 0 before the commit", "kill rank=0 step=8 phase=commit",
        Expected(("process",), (0,)), settings=KEEP_CHECKPOINTS,
    ),
    FaultCase(
        "disk full", "D5", "a checkpoint finds no space: training goes on", "full_disk rank=1 step=8", Expected(),
        settings=KEEP_CHECKPOINTS, says="no checkpoint of step 8",
    ),
    FaultCase(
        "file system full", "D5", "a full file system of checkpoints for six steps: training goes on",
        "fill_disk node=0 step=6 steps=6", Expected(),
        settings=KEEP_CHECKPOINTS, says="No space left on device", disk_bytes=64 << 20,
    ),
    FaultCase(
        "file system stays full", "D5", "a full file system of checkpoints to the end: the last save fails",
        "fill_disk node=0 step=6", Expected(("storage",), actions=("restart", "stop"), status=Exit.DO_NOT_REQUEUE),
        settings=KEEP_CHECKPOINTS, says="No space left on device", disk_bytes=64 << 20,
    ),
    FaultCase(
        "no copies in memory", "D14", "a node is lost, copies in memory off: the newest checkpoint",
        "lose_node node=2 step=7", LOST, spares=1,
        settings=("checkpoint.in_memory_every=0", "checkpoint.replicate=false", *KEEP_CHECKPOINTS), most_lost=4,
    ),
    FaultCase(
        "slow rank", "F1", "a rank sleeps 0.3 s in four steps: no restart", "slow rank=4 step=5 delay_s=0.3 steps=4",
        Expected(),
    ),
    FaultCase(
        "short stop", "B3", "a rank stands still for 2 s, as at a flap: no restart", "stop rank=3 step=6 for_s=2",
        Expected(),
    ),
    node_case("node throttled", "F1", "a node has 0.5 of a core: no restart", "throttle_cpu cores=0.5", Expected()),
    link_case("link cut", "B1", "a node's link is cut; a spare", "cut_link node=2 step=6", LOST, spares=1),
    link_case("link flaps", "B3", "a node's link is cut for 3 s: no restart", "cut_link node=2 step=6 for_s=3", FLAP),
    link_case(
        "pair flaps", "B3", "two nodes lose each other for 3 s: no restart", "cut_link node=1 peer=3 step=6 for_s=3",
        FLAP,
    ),
    link_case(
        "pair cut", "B1", "two nodes lose each other, and reach all others; a spare", "cut_link node=1 peer=3 step=6",
        PAIR, spares=1,
    ),
    link_case(
        "one way", "B2", "what a node sends to another is lost; a spare", "mute_link node=1 peer=3 step=6", PAIR,
        spares=1,
    ),
    link_case(
        "link throttled", "B4", "a node's link has 20 Mbit/s: no restart", "throttle_link node=2 step=6 mbit=20",
        Expected(),
    ),
    link_case(
        "link delayed", "B6", "a node's link delays by 20 ms: no restart", "delay_link node=2 step=6 delay_s=0.02",
        Expected(),
    ),
    link_case(
        "connections reset", "B7", "all connections of a node are reset", "reset_link node=2 step=6",
        Expected(("network", "unknown", "software")),
    ),
)  # fmt: skip
