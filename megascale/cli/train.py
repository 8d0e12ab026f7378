"""`megascale train`: under torchrun or srun one rank of the job; otherwise the launcher of the layout's ranks."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megascale.cli.main import add_config_arguments
from megascale.cli.torch_import import torch_import_problem
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.config.time_rules import unknown_ranks
from megascale.config.toml_reader import read_toml
from megascale.config.train import ObserveConfig
from megascale.core.errors import ConfigError, DataError, MegascaleError, Problem
from megascale.core.files import exists, foreign_owner, lock_folder
from megascale.core.limits import os_error_hint, raise_soft_limits
from megascale.core.process import die_with_parent
from megascale.core.rank import STORE_VARIABLE, Rank, local_world_size, on_one_host, rank_from_environment
from megascale.core.run_folder import LOGS, TOKEN_VARIABLE, check_known, read_token
from megascale.operate.diagnose.hang import flight
from megascale.operate.node import environment
from megascale.operate.node.failure import write_end, write_error
from megascale.operate.node.host_limits import datasets_by_split, limit_findings, wanted_open_files
from megascale.operate.store.settings import StoreSettings
from megascale.record.log_files import FLIGHT_RECORD_VARIABLE, log_of_rank

if TYPE_CHECKING:
    from megascale.train.resume import InitialWeights


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    rank = rank_from_environment()
    with contextlib.ExitStack() as held:
        try:
            config = _load_config(options, rank)
            environment.set_defaults(config.folder if config.world_size > 1 else None)
            raise_limits(config, local_world_size(1) if rank else config.world_size)
            # otherwise the launcher holds the lock
            if rank is None or (rank.rank == 0 and STORE_VARIABLE not in os.environ):
                held.enter_context(_begin_run(config, rank))
        except MegascaleError as error:
            if rank is not None:
                write_error(error, rank)
                _announce_failed_start(error, rank, options)
            raise
        if rank is None and config.world_size > 1:
            return _launch_ranks(options, config)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(os.getppid())  # a killed torchrun leaves its workers training
        place = rank or Rank(0, 1, 0, socket.gethostname())
        # before torch, whose import takes seconds
        collected = bool(config.observe.store or config.observe.metrics_port)
        note = dataclasses.asdict(StoreSettings.from_config(config)) if config.observe.store else None
        log = held.enter_context(log_of_rank(config.folder, place, note=note, collected=collected))
        if place.local_rank == 0 and collected and FLIGHT_RECORD_VARIABLE not in os.environ:
            from megascale.cli.collect import collector_process

            held.enter_context(collector_process(config.folder, config.observe))  # else the launcher or agent collects
        try:
            from megascale.train.entry import run_rank
        except Exception as error:
            if rank is not None and (problem := torch_import_problem(error)) is not None:
                write_error(problem, rank)
            raise
        status = run_rank(config, place, open_weights, log)
        write_end(place, status)
        return status


def _announce_failed_start(error: MegascaleError, rank: Rank, options: argparse.Namespace) -> None:
    """Tell the ranks of other hosts; on this host the launcher notices the end of a rank."""
    if rank.world_size == 1 or on_one_host(rank.world_size) or STORE_VARIABLE in os.environ:
        return
    folder: Any = None
    with contextlib.suppress(ConfigError):
        observe = read_toml(options.config, options.overrides).tree.get("observe")
        folder = observe.get("dir") if isinstance(observe, dict) else None
    default = ObserveConfig.model_fields["dir"].default
    with contextlib.suppress(ImportError):  # torch cannot be loaded here
        from megascale.comm.meeting import announce_failed_start

        announce_failed_start(rank, error.message, Path(folder if isinstance(folder, str) else default))


def _launch_ranks(options: argparse.Namespace, config: RunConfig) -> int:
    """Launch the layout's ranks on this host. What only a launcher needs is imported here: a rank starts without."""
    from megascale.operate.driver.one_host import run_on_this_host

    if warning := environment.warn_of_idle_hosts(config.world_size):
        print(warning, file=sys.stderr)
    words, observe = ["train", options.config, *options.overrides], config.observe
    return run_on_this_host(words, config.world_size, config.folder, (observe.metrics_address, observe.metrics_port))


def _load_config(options: argparse.Namespace, rank: Rank | None) -> RunConfig:
    """Load the configuration of a rank, or of the launcher. Where only the number of ranks is wrong, the hints name the
    variables that it comes from: those of an operator or a shell may not be meant for this job.
    """
    if rank is None:
        config = load_config(options.config, options.overrides)
        findings = list(unknown_ranks(config.fault, config.world_size))
        if findings:
            raise ConfigError([Problem("configuration", one.key, one.message, one.hint) for one in findings])
        return config
    try:
        return load_config(options.config, options.overrides, world_size=rank.world_size)
    except ConfigError as error:
        if STORE_VARIABLE in os.environ and all(problem.key.startswith("data.") for problem in error.problems):
            raise DataError("\n".join(map(str, error.problems))) from None  # megascale's launcher found the data whole
        load_config(options.config, options.overrides)  # raises mistakes that do not depend on the ranks
        also = f"{rank.variables} in the environment make this process one of {rank.world_size}: unset them, and "
        also += "megascale train starts the ranks of this host"
        raise ConfigError(
            [dataclasses.replace(problem, hint=f"{problem.hint}; {also}") for problem in error.problems]
        ) from None


def open_weights(folder: Path) -> InitialWeights:
    """Open a folder of Hugging Face weights. The import is here because only a run with initial weights needs it."""
    from megascale.convert.huggingface import PretrainedWeights

    return PretrainedWeights(folder)


def raise_limits(config: RunConfig, ranks: int) -> None:
    """Raise soft limits of the operating system to the needs of `ranks` ranks on this host, which inherit the limits.

    Raises: ConfigError if a hard limit is lower.
    """
    datasets, world = datasets_by_split(config.data, config.train.eval_every), config.world_size
    raise_soft_limits(wanted_open_files(datasets, world))
    if findings := list(limit_findings(datasets, world, ranks, saves=bool(config.checkpoint.every))):
        where = f"host {socket.gethostname()}"
        raise ConfigError([Problem(where, finding.key, finding.message, finding.hint) for finding in findings])


def _begin_run(config: RunConfig, rank: Rank | None) -> contextlib.ExitStack:
    """Lock the run's folder, and let the ranks of this start know its id: none goes on in an empty place, also if
    torchrun starts them again.

    Raises: as `lock_run_folder`; CheckpointError if the run's token cannot be used; LostFolderError if an earlier start
    by this torchrun has begun a run that is not there
    """
    with contextlib.ExitStack() as held:
        held.callback(os.environ.pop, TOKEN_VARIABLE, None)
        if rank is not None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            from megascale.comm.rendezvous import run_of_torchrun

            os.environ[TOKEN_VARIABLE] = run_of_torchrun(rank)
            check_known(config.folder)
        held.enter_context(lock_run_folder(config))
        os.environ[TOKEN_VARIABLE], _ = read_token(config.folder)
        return held.pop_all()


def lock_run_folder(config: RunConfig) -> contextlib.ExitStack:
    """Make and lock the run's folder, and its checkpoint folder on a local file system. The locks keep other jobs out
    until the returned stack is closed.

    Raises: ConfigError if a folder cannot be written, is locked by another job, or holds a run that must not resume;
    PathError if the file system does not say what is there
    """
    with contextlib.ExitStack() as held:
        held.enter_context(_lock(config.folder, "observe.dir"))
        with _explain_os_error(config.folder / LOGS, "observe.dir"):
            (config.folder / LOGS).mkdir(exist_ok=True)
        if config.world_size > 1:
            with _explain_os_error(config.folder / flight.DUMP_FOLDER, "observe.dir"):
                flight.make_dump_folder(config.folder)
        if config.checkpoint.resume == "never" and exists(config.folder / "metrics.jsonl"):
            hint = "choose another name, or checkpoint.resume = auto"
            raise ConfigError([Problem(str(config.folder), "name", "there is a run of this name already", hint)])
        # an unwritable checkpoint folder must fail here, not at the first save
        if config.checkpoint.every and (local := _local(config.checkpoint_folder)):
            if config.checkpoint.dir:
                held.enter_context(_lock(local, "checkpoint.dir"))
            else:
                with _explain_os_error(local, "observe.dir"):
                    local.mkdir(exist_ok=True)
        return held.pop_all()


def _lock(folder: Path, key: str) -> IO[str]:
    with _explain_os_error(folder, key):
        folder.mkdir(parents=True, exist_ok=True)
        if (owner := foreign_owner(folder)) is not None:
            message = f"belongs to user {owner}, who could replace what this job writes there"
            raise ConfigError([Problem(str(folder), key, message, "another name or folder, or give it to this user")])
        return lock_folder(folder, f"process {os.getpid()} on {socket.gethostname()}")


@contextlib.contextmanager
def _explain_os_error(folder: Path, key: str) -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        message = f"a job trains in this folder already: {error.strerror}"
        raise ConfigError(
            [Problem(str(folder), "name", message, "choose another name, or end the job first")]
        ) from None
    except OSError as error:
        hint = os_error_hint(error, "give a writable folder")
        raise ConfigError([Problem(str(folder), key, f"cannot be written: {error.strerror}", hint)]) from None


def _local(url: str) -> Path | None:
    from megascale.core.storage import Location

    return Location(url).local_path
