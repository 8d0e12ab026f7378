"""`megascale train`: a rank of a job under torchrun or srun; elsewhere the launcher of the ranks that the layout
needs.
"""

from __future__ import annotations

import argparse
import os

from megascale.cli.main import add_config_arguments
from megascale.config.explain import load
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.process import die_with
from megascale.core.rank import Rank, from_environment
from megascale.launch.failure import write_error


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    rank = from_environment()
    try:
        config = load(options.config, options.overrides, world=rank.world if rank else None)
        if rank is None or rank.rank == 0:
            refuse_to_overwrite(config)
    except ConfigError as error:
        if rank is not None:
            write_error(error, rank)
        raise
    if rank is None and config.world > 1:
        from megascale.launch import local

        arguments = ["train", options.config, *options.overrides]
        return local.run(arguments, config.world, config.folder / "logs")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # torchrun, when it is killed, leaves its workers training
    from megascale.train.entry import run_rank

    return run_rank(config, rank or Rank(0, 1, 0, _host()))


def _host() -> str:
    import socket

    return socket.gethostname()


def refuse_to_overwrite(config: RunConfig) -> None:
    """A run that must not resume may not write over another's folder.

    Raises: ConfigError
    """
    if config.checkpoint.resume == "never" and (config.folder / "metrics.jsonl").exists():
        raise ConfigError(
            [
                Problem(
                    str(config.folder),
                    "name",
                    "there is a run of this name already",
                    "another name, or checkpoint.resume = auto",
                )
            ]
        )
