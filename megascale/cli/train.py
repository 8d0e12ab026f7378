"""`megascale train`: a rank of a job under torchrun or srun; elsewhere the launcher of the ranks that the layout
needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from typing import IO

from megascale.cli.main import add_config_arguments
from megascale.config.explain import load
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.files import claim
from megascale.core.process import die_with
from megascale.core.rank import STORE, Rank, from_environment
from megascale.launch import local
from megascale.launch.failure import write_error


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    rank = from_environment()
    with contextlib.ExitStack() as held:
        try:
            config = load(options.config, options.overrides, world=rank.world if rank else None)
            if rank is None or (rank.rank == 0 and STORE not in os.environ):  # else our launcher holds it
                held.enter_context(hold_folder(config))
        except ConfigError as error:
            if rank is not None:
                write_error(error, rank)
            raise
        if rank is None and config.world > 1:
            arguments = ["train", options.config, *options.overrides]
            return local.run(arguments, config.world, config.folder / "logs")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with(os.getppid())  # torchrun, when it is killed, leaves its workers training
        from megascale.train.entry import run_rank

        return run_rank(config, rank or Rank(0, 1, 0, socket.gethostname()))


def hold_folder(config: RunConfig) -> IO[str]:
    """Make the run's folder and keep other jobs out of it until the returned file is closed.

    Raises: ConfigError if it cannot be written, another job trains in it, or holds a run that must not resume.
    """
    folder = config.folder
    try:
        held = claim(folder, f"process {os.getpid()} on {socket.gethostname()}")
        if config.checkpoint.every and not config.checkpoint.dir:  # better found now than at the first save
            (folder / "checkpoints").mkdir(exist_ok=True)
    except BlockingIOError as error:
        found = f"a job trains in this folder already: {error.strerror}"
        raise ConfigError([Problem(str(folder), "name", found, "another name, or end that job first")]) from None
    except OSError as error:
        mend = "a folder that can be written"
        raise ConfigError([Problem(str(folder), "observe.dir", f"cannot be written: {error.strerror}", mend)]) from None
    if config.checkpoint.resume == "never" and (folder / "metrics.jsonl").exists():
        held.close()
        mend = "another name, or checkpoint.resume = auto"
        raise ConfigError([Problem(str(folder), "name", "there is a run of this name already", mend)])
    return held
