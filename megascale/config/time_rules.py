"""Rules of nested times, in `[launch]`, `[comm]`, `[checkpoint]`, `[fault]` and NCCL's retries; of NCCL's thread
blocks; of stages that are rebuilt after a fault; and of injected faults: a test without its faults would pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from megascale.catalog.optimizers import MATRIX_UNITS, OPTIMIZERS
from megascale.config.exclusions import only, unless, unsupported
from megascale.config.fault import FaultConfig
from megascale.config.finding import Finding
from megascale.config.injection import parse_injection
from megascale.config.launch import CommConfig, LaunchConfig, NcclConfig
from megascale.config.model import ModelConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.train import CheckpointConfig, OptimizerConfig, TrainConfig


def timeouts(launch: LaunchConfig, comm: CommConfig, checkpoint: CheckpointConfig) -> Iterator[Finding]:
    """Check that start_timeout_s covers the other timeouts."""
    key, start, retry = "launch.start_timeout_s", launch.start_timeout_s, checkpoint.retry_timeout_s
    if start < comm.timeout_s:
        message = f"{start} s is less than comm.timeout_s = {comm.timeout_s}"
        yield Finding(key, message, f"{comm.timeout_s} or more")
    if checkpoint.every and start <= retry:
        message = f"{start} s is no more than checkpoint.retry_timeout_s = {retry}, which a rank may spend on a save"
        yield Finding(key, message, f"more than {retry}")


def fault_times(fault: FaultConfig) -> Iterator[Finding]:
    """Check that the times of `[fault]` nest: heartbeat < flap < lost node, and no verdict before a heartbeat."""
    for short, long in (("poll_s", "hang_s"), ("heartbeat_s", "node_lost_s"), ("link_recovery_s", "node_lost_s")):
        low, high = getattr(fault, short), getattr(fault, long)
        if low >= high:
            yield Finding(f"fault.{long}", f"{high} s is no more than fault.{short} = {low}", f"more than {low}")
    for key in ("start_hang_s", "evaluation_hang_s", "checkpoint_hang_s"):
        if (bound := getattr(fault, key)) < fault.hang_s:
            message = f"{bound} s is less than fault.hang_s = {fault.hang_s}"
            yield Finding(f"fault.{key}", message, f"{fault.hang_s} or more")


def injected_faults(fault: FaultConfig, train: TrainConfig) -> Iterator[Finding]:
    """Check that the faults are those of ranks, which alone a run injects, and strike in steps that it has."""
    for injected in parse_injection(fault.inject).faults:
        if injected.target != "rank":
            message = f"{injected.kind} is a fault of the {injected.target}, and a run injects only faults of its ranks"
            hint = "a fault of a rank; `python tools/lab faults` injects others from outside"
            yield Finding("fault.inject", message, hint)
        elif injected.step > train.steps:
            message = f"there is no step {injected.step} for {injected.kind}"
            yield Finding("fault.inject", message, f"a step from 1 to {train.steps}")


def layout_ranks(fault: FaultConfig, parallel: ParallelConfig) -> Iterator[Finding]:
    """Check the ranks of faults in a layout that gives the number of processes."""
    if isinstance(parallel.dp, int):
        yield from unknown_ranks(fault, parallel.replica_size * parallel.dp)


def unknown_ranks(fault: FaultConfig, world_size: int) -> Iterator[Finding]:
    """Check that a job of `world_size` processes has the ranks of its faults."""
    for injected in parse_injection(fault.inject).faults:
        if injected.rank is not None and injected.rank >= world_size:
            ranks = f"a rank from 0 to {world_size - 1}" if world_size > 1 else "rank 0, the only one"
            yield Finding("fault.inject", f"there is no rank {injected.rank} for {injected.kind}", ranks)


REBUILT_STAGES = unsupported(
    "fault.rebuild_stage",
    ("parallel.pp", unless(1, 2), "with pp = {value} no stage is between two others", "3 or more"),
    ("parallel.vocab_pp", only(0), "a lost stage has rows of the vocabulary", "0"),
    ("model.experts", only(0), "experts of different layers do not correspond", "0"),
    ("model.exits", only([]), "the head of an exit has no neighbours", "[]"),
    ("train.weight_average", only("none"), "averages are not rebuilt", "none"),
    ("checkpoint.in_memory_every", unless(0), "the other stages have no copies", "1"),
)  # fmt: skip


def rebuilt_stages(
    model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, fault: FaultConfig
) -> Iterator[Finding]:
    """Check that the neighbours of a lost stage have layers of equal kinds, and gradient norms."""
    chunks, sizes, why = parallel.pp * parallel.vpp, parallel.layers_per_chunk, fault.rebuild_stage
    rules = dict.fromkeys([optimizer.name, *(group.get("name", optimizer.name) for group in optimizer.groups)])
    facts = {name: OPTIMIZERS[name].facts for name in rules if why}
    unsuited = [
        name for name, of in facts.items()
        if of["unit_of_work"] in MATRIX_UNITS or of["state"].get("exp_avg_sq") != "mn"
    ]  # fmt: skip
    given, off = f"(fault.rebuild_stage = {why})", "or no rebuild_stage"
    if why and sizes is None and model.num_layers % chunks:
        message = f"{model.num_layers} layers do not make {chunks} equal stages {given}"
        yield Finding("model.num_layers", message, f"a multiple of {chunks}, {off}")
    if why and len(set(sizes or ())) > 1:
        message = f"layers of unequal stages do not correspond {given}"
        yield Finding("parallel.layers_per_chunk", message, f"equal numbers, {off}")
    if unsuited:
        message = f"{', '.join(unsuited)}: no mean of every element's squared gradient {given}"
        yield Finding("optimizer.name", message, f"adamw or lamb, {off}")


def launch_findings(
    world_size: int, fault: FaultConfig, launch: LaunchConfig, comm: CommConfig, checkpoint: CheckpointConfig,
    nccl: NcclConfig,
) -> Iterator[Finding]:  # fmt: skip
    """Check, for a job of `world_size` processes with a driver, that a rank's own timeouts are longer than what the
    driver needs for a verdict, that an adapter retries for longer than a flap, and that ranks with injected faults
    exist.
    """
    yield from unknown_ranks(fault, world_size)
    step, start = ("comm.timeout_s", comm.timeout_s), ("launch.start_timeout_s", launch.start_timeout_s)
    for key, (limit, timeout) in (
        ("hang_s", step), ("node_lost_s", step), ("evaluation_hang_s", step), ("start_hang_s", start),
        ("checkpoint_hang_s", start),
    ):  # fmt: skip
        needed = getattr(fault, key) + fault.diagnosis_timeout_s
        if needed >= timeout:
            message = f"{timeout} s: ranks would give up before the verdict, fault.{key} + fault.diagnosis_timeout_s"
            yield Finding(limit, message, f"more than {needed:g}")
    if checkpoint.every and fault.checkpoint_hang_s <= (retry := checkpoint.retry_timeout_s):
        message = f"{fault.checkpoint_hang_s} s is no more than checkpoint.retry_timeout_s = {retry}"
        yield Finding("fault.checkpoint_hang_s", message, f"more than {retry}")
    if (patience := nccl.ib_patience_s) <= fault.link_recovery_s:
        flap = f"fault.link_recovery_s = {fault.link_recovery_s}"
        message = f"adapters give up after {patience:.3g} s, within a flap of {flap}"
        yield Finding("nccl.ib_timeout", message, "a larger exponent")
    elif patience >= comm.timeout_s:
        message = f"adapters retry for {patience:.3g} s, longer than comm.timeout_s = {comm.timeout_s}"
        yield Finding("nccl.ib_timeout", message, "a smaller exponent, or a longer comm.timeout_s")


def nccl_ctas(nccl: NcclConfig) -> Iterator[Finding]:
    """Check that minima do not exceed maxima."""
    for key in ("tp_ctas", "cp_ctas", "ep_ctas", "dp_ctas", "pp_ctas", "world_ctas"):
        ctas = getattr(nccl, key)
        if isinstance(ctas, list) and ctas[0] > ctas[1]:
            yield Finding(f"nccl.{key}", f"at least {ctas[0]} and at most {ctas[1]}", f"[{ctas[1]}, {ctas[0]}]")
