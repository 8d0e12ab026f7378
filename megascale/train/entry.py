"""Entry point of a rank: join the job, build the run, resume, train, shut down."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Never

from megascale.catalog.accelerators import Peak
from megascale.comm import init
from megascale.comm.control import announce_exit, describe_lost
from megascale.comm.rendezvous import remember_run
from megascale.comm.store import count_requests
from megascale.config.run import RunConfig
from megascale.core.errors import CheckpointError, Exit, LostPeerError, MegascaleError
from megascale.core.limits import PROCESSES_HINT, lacks_threads, os_error_hint
from megascale.core.rank import NODE_VARIABLE, Rank
from megascale.device import detect_device
from megascale.operate.node import affinity
from megascale.operate.node.failure import exit_status_of, is_peer_lost, write_end, write_error
from megascale.record.layout import Phase
from megascale.record.log import RankLog
from megascale.train.build import build_mesh, build_rank_run
from megascale.train.loop import train
from megascale.train.memory_choice import with_chosen_memory
from megascale.train.peak_flops import find_peak_flops
from megascale.train.reporter import Reporter, open_writers
from megascale.train.resume import OpenWeights, load_initial_state
from megascale.train.run import Run
from megascale.train.saves import Saves
from megascale.train.stop import StopRequest

if TYPE_CHECKING:
    from megascale.record.metrics_writers import MetricsWriter

STORE_ANSWER_S = 2.0  # seconds that a failing rank waits for the job's store


def run_rank(config: RunConfig, rank: Rank, open_weights: OpenWeights, log: RankLog) -> int:
    """Run this rank to the end and return the exit status. `log`: this rank's.

    `open_weights` opens the folder of `checkpoint.resume = "hf:..."`. On an error the process exits at once, because an
    orderly shutdown of process groups would wait for ranks that wait for this rank.
    """
    stop = StopRequest().install_handlers(lambda message, status: _report_stop(message, status, rank, log))
    try:
        status = _run(config, rank, stop, open_weights, log)
        log.end(status)
        log.set_phase(Phase.DONE)
        init.shutdown_distributed()
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # a library may call sys.exit
        with stop.deferred():  # launchers end the other ranks by a signal, which is not the cause
            _clean_up(config.folder, config.checkpoint.in_memory_dir, exit_status_of(error), rank, log)
            log.end(exit_status_of(error))
            if lacks_threads(error):
                error = MegascaleError(f"a thread cannot be started: {error}", hint=PROCESSES_HINT)
            _exit_with_error(error, rank)
    return status


def _clean_up(run: Path, memory: str, status: int, rank: Rank, log: RankLog) -> None:
    """Do at a rank's end what a launcher does, where there is none. `memory`: folder of the copies in memory."""
    from megascale.record.log_files import FLIGHT_RECORD_VARIABLE

    if status == Exit.CONFIG and log.path and FLIGHT_RECORD_VARIABLE not in os.environ:
        log.path.unlink(missing_ok=True)  # nothing to diagnose
    if status == Exit.DO_NOT_REQUEUE and not rank.local_rank and NODE_VARIABLE not in os.environ:
        from megascale.operate.node.stored_copies import copies_notice

        with contextlib.suppress(OSError):
            if notice := copies_notice(Path(memory), run):
                print(notice, file=sys.stderr, flush=True)


def _report_stop(message: str, status: Exit, rank: Rank, log: RankLog) -> None:
    """Report a signal that ends this rank at once. The store may be in use by the main thread: peers are not told."""
    log.end(status)
    with contextlib.suppress(OSError):
        if not write_end(rank, status, message):
            print(f"{rank}: {message}", file=sys.stderr, flush=True)


def _exit_with_error(error: BaseException, rank: Rank) -> Never:
    """Report the error to peers, error file and stderr, ignoring a full disk or a closed terminal, and exit."""
    text = str(error)
    peers = error.peers if isinstance(error, LostPeerError) else ()
    _ask_store(lambda: announce_exit(f"{rank}: {error}"))
    with contextlib.suppress(OSError):  # before stderr: a rank that lost a peer waits in here, so the cause comes first
        text = write_error(error, rank, lambda: _ask_store(lambda: describe_lost(rank.rank, peers)))
    if is_peer_lost(error):
        text = f"{rank}: lost another rank: {text}"
    elif isinstance(error, MegascaleError):
        text = f"{rank}: {text}"
    else:
        text = f"{rank}:\n{traceback.format_exc()}"
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(exit_status_of(error))


def _ask_store(question: Callable[[], str | None]) -> str:
    """Return the answer of the store, or "" if it is gone: its host may have lost its power, and never answer."""
    answers: list[str] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(question() or "")

    with contextlib.suppress(RuntimeError):  # this process may have no thread left
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(STORE_ANSWER_S)
    return answers[0] if answers else ""


def _run(config: RunConfig, rank: Rank, stop: StopRequest, open_weights: OpenWeights, log: RankLog) -> Exit:
    log.set_phase(Phase.RENDEZVOUS)
    device = detect_device(rank.local_rank)
    affinity.bind_to_local_cores(device.pci_address)
    record, injection, folder = None, None, Path(config.output_dir)
    if rank.world_size > 1:
        from megascale.train.rank_record import rank_record

        record = rank_record(config, rank, device)
    init.init_distributed(rank, device, config.launch, config.nccl, record=record, folder=folder)
    log.start_parts.count = count_requests
    remember_run(rank)
    if config.fault.inject:
        from megascale.train.fault_injection import fault_injection

        injection = fault_injection(config.fault.inject, rank, config.folder)
    log.set_phase(Phase.GROUPS)
    mesh = build_mesh(config, rank, device, log)
    log.set_phase(Phase.BUILD)
    config = with_chosen_memory(config, device, mesh)
    if injection is not None:
        injection.reach("build")
    run = build_rank_run(config, mesh, device, stop)
    peak = find_peak_flops(run)
    log.set_phase(Phase.LOAD)
    if injection is not None:
        injection.attach(run)
        injection.reach("load")
    resumed = load_initial_state(run, open_weights)
    if run.outer is not None:
        from megascale.train.outer_steps import Sites

        run.sites = Sites(run)
    reporter = _open_reporter(run, peak, resumed)
    try:
        if run.progress.step >= config.train.steps:
            _save_finished(run, reporter)
            return Exit.OK
        if config.observe.event_store:
            from megascale.train.stored_attempt import begin_stored_attempt

            begin_stored_attempt(run, peak)
        return train(run, reporter)
    finally:
        reporter.close()


def _open_reporter(run: Run, peak: Peak | None, resumed: str) -> Reporter:
    """Open what reports of the run, and say how it begins. `resumed`: what it was resumed from, "" for nothing."""
    config, step = run.config, run.progress.step
    if run.mesh.rank:
        return Reporter(config, run.device, peak, [], run.mesh.recorder)
    from megascale.data.read.identity import replaced_datasets
    from megascale.train.run_summary import run_summary

    replaced = replaced_datasets(config.data, config.folder) if step else []
    reporter = Reporter(config, run.device, peak, _prepare_folder(config, step), run.mesh.recorder)
    if step:
        reporter.load_history(config.folder)
    texts = [run_summary(run, peak)]
    if config.fault.inject:
        texts.append(f"WARNING: this run injects faults: {config.fault.inject}")
    if config.data.packing == "decompose":
        from megascale.data.mix.bucket_summary import describe_buckets
        from megascale.train.run_splits import mixture_spec

        texts.append(describe_buckets(mixture_spec(config, "train")))
    for text in filter(None, [*texts, resumed, *(f"WARNING: {text}" for text in replaced)]):
        reporter.write_message(text)
    if run.origin.rebuilt:
        from megascale.record.metrics import RebuiltStages

        shares = run.origin.rebuilt.items()
        by_name = {str(s): {str(s - 1): before, str(s + 1): after} for s, (before, after) in shares}
        reporter.write(RebuiltStages(step, by_name))
    return reporter


def _save_finished(run: Run, reporter: Reporter) -> None:
    """Keep the last state of a run whose steps are all done: on storage, if it was in memory alone."""
    if run.checkpoints.resumed_from_memory:
        with run.stop.deferred():
            Saves(reporter).save_final(run)
    else:
        run.checkpoints.drop_memory_copies()
    reporter.write_message(f"all {run.config.train.steps} steps are done: raise train.steps to continue")


def _prepare_folder(config: RunConfig, resumed_step: int) -> list[MetricsWriter]:
    """Write configuration and datasets' identities into the run's folder, and open the writers; only after the resume
    accepted the folder. A run that is done keeps the configuration it was done with.

    Raises: CheckpointError if the folder cannot be written: it could when the run began
    """
    from megascale.config.toml_writer import to_toml
    from megascale.core.files import exists, write_text
    from megascale.data.read.identity import write_identities

    try:
        path = config.folder / "config.toml"
        if resumed_step < config.train.steps or not exists(path):
            write_text(path, to_toml(config))
            write_identities(config.data, config.folder)
        return open_writers(config.folder, config.train.steps, resumed_step, tensorboard=config.observe.tensorboard)
    except OSError as error:
        what = f"{error.filename or config.folder} cannot be written: {error.strerror or error}"
        raise CheckpointError(what, hint=os_error_hint(error, "see the file system of the run's folder")) from None
