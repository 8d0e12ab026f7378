"""One rank's life: join the job, build, resume, train, leave."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Never

import torch

from megascale.account.memory import rank_memory
from megascale.account.parameters import parameter_count
from megascale.account.peaks import Peak
from megascale.comm import init
from megascale.comm.control import announce
from megascale.config.resolved import to_toml
from megascale.config.run import RunConfig
from megascale.core.errors import Exit, MegascaleError
from megascale.core.files import write_text
from megascale.core.rank import Rank
from megascale.core.units import format_bytes, format_count, format_flops
from megascale.device import detect
from megascale.launch import affinity
from megascale.launch.failure import exit_status_of, peer_was_lost, write_error
from megascale.ops.advice import advice
from megascale.ops.select import Setting, serving
from megascale.train.build import Run, build, mesh_of
from megascale.train.eventfile import EventFile
from megascale.train.loop import conclude, train
from megascale.train.peak import find_peak
from megascale.train.report import Reporter, open_writers
from megascale.train.resume import OpenWeights, resume
from megascale.train.stop import Stop


def run_rank(config: RunConfig, rank: Rank, open_weights: OpenWeights) -> int:
    """Run this rank to its end and return its exit status. `open_weights`: opens what `checkpoint.resume = "hf:..."`
    names. On an error the process ends here and now: the communication library's own tear-down would wait for ranks
    that wait for this one.
    """
    stop = Stop().listen()
    try:
        status = _run(config, rank, stop, open_weights)
        init.stop()
    except (Exception, KeyboardInterrupt) as error:
        _leave(error, rank)
    return status


def _leave(error: BaseException, rank: Rank) -> Never:
    """Say what happened, to whom there is: the disk may be full, and the terminal gone."""
    if isinstance(error, MegascaleError):
        text = f"{rank}: {error}"
    elif peer_was_lost(error):
        text = f"{rank}: lost another rank: {error}"
    else:
        text = f"{rank}:\n{traceback.format_exc()}"
    with contextlib.suppress(RuntimeError):  # the store may have gone
        announce(f"{rank}: {error}")
    with contextlib.suppress(OSError):
        write_error(error, rank)  # first: who lost another rank waits there, and speaks later
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(exit_status_of(error))


def _run(config: RunConfig, rank: Rank, stop: Stop, open_weights: OpenWeights) -> Exit:
    device = detect(rank.local)
    affinity.bind(device.pci_address)
    init.start(rank, device, config.launch, config.nccl, pp=config.parallel.pp)
    first = rank.rank == 0
    run = build(config, mesh_of(config, rank, device), device, stop)
    peak = find_peak(run)
    resumed = resume(run, open_weights)
    if first:  # not before it is known that the run can go on in this folder
        write_text(config.folder / "config.toml", to_toml(config))
    writers = open_writers(config, run.progress.step) if first else []
    reporter = Reporter(config, device, peak, writers, run.mesh.recorder)
    try:
        if first and run.progress.step:
            reporter.remember(config.folder)
        reporter.note(introduction(run, peak))
        if resumed:
            reporter.note(resumed)
        if run.progress.step >= config.train.steps:
            if run.checkpoints.in_memory:
                conclude(run, reporter)
            else:
                run.checkpoints.forget()
            reporter.note(f"all {config.train.steps} steps are done: raise train.steps to go on")
            return Exit.OK
        with EventFile(run, rank):
            return train(run, reporter)
    finally:
        reporter.close()


def introduction(run: Run, peak: Peak | None) -> str:
    """What is about to run, for people."""
    config, p, m = run.config, run.config.parallel, run.config.model
    threads = f", {torch.get_num_threads()} threads each" if run.device.is_cpu else ""
    memory = rank_memory(config, run.mesh.coord.pp)
    name = f"{config.name}: {format_count(parameter_count(m))} parameters in {config.train.precision}"
    tensor, pipeline = f"tp {p.tp}{' with sp' if p.sp else ''}", f"pp {p.pp} (vpp {p.vpp}, {p.schedule})"
    shape = f"{tensor} x {pipeline} x dp {config.dp} (zero {p.zero})"
    step = f"a step is {config.batch.total} x {m.seq_length} tokens, {config.micro_batches} micro-batches a rank"
    setting = Setting.of(config, run.device)
    backends = ", ".join(f"{operation} {backend}" for operation, backend in serving(setting).items())
    against = f"{format_flops(peak.flops)} a rank ({peak.source})" if peak else ""
    lines = [
        f"{name}, {shape} = {config.world} ranks{threads}",
        f"{step}; rank {run.mesh.rank} needs {format_bytes(memory.total)}: parameters, gradients and optimizer "
        f"{format_bytes(memory.parameters + memory.gradients + memory.optimizer)}, activations "
        f"{format_bytes(memory.activations)}, transient {format_bytes(memory.transient)} at most",
        f"backends: {backends}{', blocks compiled' if config.train.compile else ''}",
        *([f"WARNING: {slow}"] if (slow := advice(setting)) else []),
        f"MFU is measured against {against}" if peak else f"MFU n/a: the peak of {run.device.name!r} is not known",
        f"writing to {config.folder}",
    ]
    return "\n".join(lines)
