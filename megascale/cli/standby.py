"""`megascale standby`: a process that has imported what a rank needs, and waits for its task; started by agents."""

from __future__ import annotations

import argparse
import sys

from megascale.core.process import imports_to_keep
from megascale.operate.node import environment
from megascale.operate.node.standby_process import take_task


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    sub.add_argument("--channel", type=int, required=True, help="descriptor of the socket to the agent")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status: that of the task."""
    environment.set_defaults()  # before torch is imported
    with imports_to_keep():
        import megascale.cli.train
        import megascale.train.entry  # noqa: F401
        from megascale.cli.main import main

    arguments = take_task(options.channel)
    if arguments is None:
        return 0
    sys.argv[1:] = arguments
    return main()
