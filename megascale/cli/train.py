"""`megascale train`: a rank of a job under torchrun or srun; elsewhere the launcher of the ranks that the layout
needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from megascale.cli.main import add_config_arguments
from megascale.config.explain import load
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.files import claim
from megascale.core.process import die_with
from megascale.core.rank import STORE, Rank, from_environment
from megascale.launch import environment, flight, local
from megascale.launch.failure import write_error

if TYPE_CHECKING:
    from megascale.train.resume import InitialWeights


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    rank = from_environment()
    with contextlib.ExitStack() as held:
        try:
            config = load(options.config, options.overrides, world=rank.world if rank else None)
            environment.prepare(config.folder if config.world > 1 else None)
            if rank is None or (rank.rank == 0 and STORE not in os.environ):  # else our launcher holds it
                held.enter_context(hold_folder(config))
        except ConfigError as error:
            if rank is not None:
                write_error(error, rank)
            raise
        if rank is None and config.world > 1:
            arguments = ["train", options.config, *options.overrides]
            return local.run(arguments, config.world, config.folder / "logs", config.folder / flight.FOLDER)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with(os.getppid())  # torchrun, when it is killed, leaves its workers training
        from megascale.train.entry import run_rank

        return run_rank(config, rank or Rank(0, 1, 0, socket.gethostname()), open_weights)


def open_weights(folder: Path) -> InitialWeights:
    """Open a folder of Hugging Face's; their library is loaded by a run that begins with one."""
    from megascale.convert.huggingface import Pretrained

    return Pretrained(folder)


def hold_folder(config: RunConfig) -> contextlib.ExitStack:
    """Make the run's folder, and that of its checkpoints if it is on a file system of this host, and keep other jobs
    out of them until what is returned is closed.

    Raises: ConfigError if one cannot be written, another job trains in it, or holds a run that must not resume.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(_claimed(config.folder, "observe.dir"))
        if config.world > 1:
            with _told(config.folder / flight.FOLDER, "observe.dir"):
                flight.prepare(config.folder)
        if config.checkpoint.resume == "never" and (config.folder / "metrics.jsonl").exists():
            mend = "another name, or checkpoint.resume = auto"
            raise ConfigError([Problem(str(config.folder), "name", "there is a run of this name already", mend)])
        if config.checkpoint.every and (local := _local(config.checkpoints)):  # better found now than at the first save
            if config.checkpoint.dir:
                held.enter_context(_claimed(local, "checkpoint.dir"))
            else:
                with _told(local, "observe.dir"):
                    local.mkdir(exist_ok=True)
        return held.pop_all()


def _claimed(folder: Path, key: str) -> IO[str]:
    with _told(folder, key):
        return claim(folder, f"process {os.getpid()} on {socket.gethostname()}")


@contextlib.contextmanager
def _told(folder: Path, key: str) -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        found = f"a job trains in this folder already: {error.strerror}"
        raise ConfigError([Problem(str(folder), "name", found, "another name, or end that job first")]) from None
    except OSError as error:
        mend = "a folder that can be written"
        raise ConfigError([Problem(str(folder), key, f"cannot be written: {error.strerror}", mend)]) from None


def _local(url: str) -> Path | None:
    from megascale.checkpoint.storage import Location

    return Location(url).local
