"""`megascale train`: under torchrun or srun one rank of the job; otherwise the launcher of the layout's ranks."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.cli.arguments import add_config_arguments
from megascale.cli.command_output import warn
from megascale.cli.rank_config import announce_failed_start, load_rank_config
from megascale.cli.run_lock import begin_run, prepare_host
from megascale.cli.torch_import import torch_import_problem
from megascale.config.run_warnings import run_warnings
from megascale.core.errors import MegascaleError
from megascale.core.process import imports_to_keep
from megascale.core.rank import STORE_VARIABLE, Rank, die_with_torchrun, local_world_size, rank_from_environment
from megascale.operate.node import environment
from megascale.operate.node.failure import write_end, write_error
from megascale.operate.store.settings import StoreSettings
from megascale.record.log_files import FLIGHT_RECORD_VARIABLE, log_of_rank

if TYPE_CHECKING:
    from megascale.train.resume import InitialWeights


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(sub)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    rank = rank_from_environment()
    with contextlib.ExitStack() as held:
        try:
            config = load_rank_config(options, rank)
            prepare_host(config, local_world_size(1) if rank else config.world_size)
            # otherwise the launcher holds the lock
            if rank is None or (rank.rank == 0 and STORE_VARIABLE not in os.environ):
                held.enter_context(begin_run(config, rank))
                warn(run_warnings(config))
        except MegascaleError as error:
            if rank is not None:
                write_error(error, rank)
                announce_failed_start(error, rank, options)
            raise
        if rank is None and config.world_size > 1:
            from megascale.operate.driver.one_host import run_on_this_host  # a rank starts without

            if warning := environment.warn_of_idle_hosts(config.world_size):
                print(warning, file=sys.stderr)
            words, at = ["train", options.config, *options.overrides], config.observe
            return run_on_this_host(words, config.world_size, config.folder, (at.metrics_address, at.metrics_port))
        die_with_torchrun()
        place = rank or Rank(0, 1, 0, socket.gethostname())
        # before torch, whose import takes seconds
        collected = bool(config.observe.event_store or config.observe.metrics_port)
        store = StoreSettings.of_rank(config.observe, config.store_folder, config.folder)
        note = dataclasses.asdict(store) if config.observe.event_store else None
        log = held.enter_context(log_of_rank(config.folder, place, note=note, collected=collected))
        if place.local_rank == 0 and collected and FLIGHT_RECORD_VARIABLE not in os.environ:
            from megascale.cli.collect import collector_process

            held.enter_context(collector_process(config.folder, config.observe))  # else the launcher or agent collects
        try:
            with imports_to_keep():
                from megascale.train.entry import run_rank
        except Exception as error:
            if rank is not None and (problem := torch_import_problem(error)) is not None:
                write_error(problem, rank)
            raise
        status = run_rank(config, place, open_weights, log)
        write_end(place, status)
        return status


def open_weights(folder: Path) -> InitialWeights:
    """Open a folder of Hugging Face weights. The import is here because only a run with initial weights needs it."""
    from megascale.convert.huggingface import PretrainedWeights

    return PretrainedWeights(folder)
