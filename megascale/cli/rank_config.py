"""The configuration of a rank, or of the launcher of the ranks, and what a rank without one tells the others."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from megascale.config.fault import FaultConfig
from megascale.config.loading import load_config
from megascale.config.run import RunConfig, RunKeys
from megascale.config.time_rules import unknown_ranks
from megascale.config.toml_reader import read_toml
from megascale.core.errors import ConfigError, DataError, MegascaleError, Problem
from megascale.core.rank import STORE_VARIABLE, Rank, on_one_host


def announce_failed_start(error: MegascaleError, rank: Rank, options: argparse.Namespace) -> None:
    """Tell the ranks of other hosts; on this host the launcher notices the end of a rank."""
    if rank.world_size == 1 or on_one_host(rank.world_size) or STORE_VARIABLE in os.environ:
        return
    folder: Any = None
    with contextlib.suppress(ConfigError):
        folder = read_toml(options.config, options.overrides).tree.get("output_dir")
    default = RunKeys.model_fields["output_dir"].default
    with contextlib.suppress(ImportError):  # torch cannot be loaded here
        from megascale.comm import meeting

        meeting.announce_failed_start(rank, error.message, Path(folder if isinstance(folder, str) else default))


def check_fault_ranks(fault: FaultConfig, world_size: int, also: str = "") -> None:
    """Check that the job has the ranks of its faults. `also`: ends the hints. Raises: ConfigError"""
    if findings := list(unknown_ranks(fault, world_size)):
        raise ConfigError([Problem("configuration", one.key, one.message, one.hint + also) for one in findings])


def load_rank_config(options: argparse.Namespace, rank: Rank | None) -> RunConfig:
    """Load the configuration of a rank, or of the launcher. Where only the number of ranks is wrong, the hints name the
    variables that it comes from: those of an operator or a shell may not be meant for this job.
    """
    if rank is None:
        config = load_config(options.config, options.overrides)
        check_fault_ranks(config.fault, config.world_size)
        return load_config(options.config, options.overrides, world_size=config.world_size)
    try:
        return load_config(options.config, options.overrides, world_size=rank.world_size)
    except ConfigError as error:
        if STORE_VARIABLE in os.environ and all(problem.key.startswith("data.") for problem in error.problems):
            raise DataError("\n".join(map(str, error.problems))) from None  # megascale's launcher found the data whole
        load_config(options.config, options.overrides)  # raises mistakes that do not depend on the ranks
        also = f"{rank.variables} in the environment make this process one of {rank.world_size}: unset them, and "
        also += "megascale train starts the ranks of this host"
        problems = [dataclasses.replace(problem, hint=f"{problem.hint}; {also}") for problem in error.problems]
        raise ConfigError(problems) from None
