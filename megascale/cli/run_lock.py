"""The start of a run on a host: its folder is made and locked, its environment and the system's limits are set."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.files import exists, foreign_owner, lock_folder
from megascale.core.limits import os_error_hint, raise_soft_limits
from megascale.core.rank import Rank
from megascale.core.run_folder import LOGS, METRICS_FILE, TOKEN_VARIABLE, check_known, read_token
from megascale.operate.channel.secret import sites_secret
from megascale.operate.diagnose.hang import flight
from megascale.operate.node import environment
from megascale.operate.node.host_limits import datasets_by_split, limit_findings, wanted_open_files


def prepare_host(config: RunConfig, ranks: int) -> None:
    """Set what `ranks` ranks on this host inherit: the environment, and soft limits of the operating system.

    Raises: ConfigError if a hard limit is lower than their needs, or without the secret of several sites.
    """
    if config.sites.count > 1:
        sites_secret()
    environment.set_defaults(config.folder if config.world_size > 1 else None)
    datasets, world = datasets_by_split(config.data, config.train.eval_every), config.world_size
    raise_soft_limits(wanted_open_files(datasets, world))
    if findings := list(limit_findings(datasets, world, ranks, saves=bool(config.checkpoint.every))):
        raise ConfigError([finding.problem(f"host {socket.gethostname()}") for finding in findings])


@contextlib.contextmanager
def begin_run(config: RunConfig, rank: Rank | None) -> Iterator[None]:
    """Lock the run's folder in the block, and let the ranks of this start know its id: none goes on in an empty place,
    also if torchrun starts them again.

    Raises: as `lock_run_folder`; CheckpointError if the run's token cannot be used; LostFolderError if an earlier start
    by this torchrun has begun a run that is not there
    """
    try:
        if rank is not None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            from megascale.comm.rendezvous import run_of_torchrun

            os.environ[TOKEN_VARIABLE] = run_of_torchrun(rank)
            check_known(config.folder)
        with lock_run_folder(config):
            os.environ[TOKEN_VARIABLE], _ = read_token(config.folder)
            yield
    finally:
        os.environ.pop(TOKEN_VARIABLE, None)


def lock_run_folder(config: RunConfig) -> contextlib.ExitStack:
    """Make and lock the run's folder, and its checkpoint folder on a local file system. The locks keep other jobs out
    until the returned stack is closed.

    Raises: ConfigError if a folder cannot be written, is locked by another job, or holds a run that must not resume;
    PathError if the file system does not say what is there
    """
    with contextlib.ExitStack() as held:
        held.enter_context(_lock(config.folder, "output_dir"))
        with _explain_os_error(config.folder / LOGS, "output_dir"):
            (config.folder / LOGS).mkdir(exist_ok=True)
        if config.world_size > 1:
            with _explain_os_error(config.folder / flight.DUMP_FOLDER, "output_dir"):
                flight.make_dump_folder(config.folder)
        refuse_second_run(config.folder, config.checkpoint.resume)
        if config.checkpoint.every:  # an unwritable checkpoint folder must fail here, not at the first save
            from megascale.core.storage import Location

            local = Location(config.checkpoint_folder).local_path
            if local and config.checkpoint.dir:
                held.enter_context(_lock(local, "checkpoint.dir"))
            elif local:
                with _explain_os_error(local, "output_dir"):
                    local.mkdir(exist_ok=True)
        return held.pop_all()


def refuse_second_run(folder: Path, resume: str) -> None:
    """Refuse to begin anew in the folder of another run. Raises: ConfigError"""
    if resume == "never" and exists(folder / METRICS_FILE):
        hint = "choose another name, or checkpoint.resume = auto"
        raise ConfigError([Problem(str(folder), "name", "there is a run of this name already", hint)])


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
        hint = "choose another name, or end the job first"
        raise ConfigError([Problem(str(folder), "name", message, hint)]) from None
    except OSError as error:
        hint = os_error_hint(error, "give a writable folder")
        raise ConfigError([Problem(str(folder), key, f"cannot be written: {error.strerror}", hint)]) from None
