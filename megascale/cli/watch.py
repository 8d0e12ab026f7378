"""`megascale watch`: the live state of every rank of a run in the terminal; with `--attach` a job without a driver gets
one, `cli.watch_attach`. No torch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.cli.arguments import add_run
from megascale.core.errors import Exit, MegascaleError
from megascale.core.network import LOOPBACK
from megascale.core.process import interrupt_on_stop_signals

if TYPE_CHECKING:
    from rich.console import Console

    from megascale.operate.show.run_reader import RunReader
    from megascale.operate.show.run_view import RunView
    from megascale.operate.show.store_follower import StoreFollower

PORT = 29600  # port of the driver, unless --driver names another

EVERY_S = 1.0

LINES_OF_A_PIPE = 50  # lines of a frame that goes to a file or a pipe


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run(sub)
    sub.add_argument("--once", action="store_true", help="print one frame, as also where the output is no terminal")
    attach = "name who hangs and who failed first in a job of torchrun or srun, also one that is about to start; start "
    attach += "the same command on each host. Exit status: that of the job"
    sub.add_argument("--attach", action="store_true", help=attach)
    driver = f"with --attach, where its driver listens: one of the job's hosts (default: this host alone, port {PORT})"
    sub.add_argument("--driver", metavar="HOST[:PORT]", help=driver)
    sub.set_defaults(refuse=sub.error)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if options.attach:
        from megascale.cli.watch_attach import attach

        if options.once:
            options.refuse("--attach prints what happens: leave out --once")
        return attach(Path(options.run), options.driver or LOOPBACK)
    if options.driver is not None:
        options.refuse("--driver needs --attach")
    from rich.console import Console

    from megascale.operate.show.run_reader import RunReader
    from megascale.operate.show.store_follower import StoreFollower

    console, reader = Console(highlight=False), RunReader(Path(options.run))
    store = StoreFollower(reader.folder)
    if options.once or not console.is_terminal or console.is_dumb_terminal:
        store.refresh()
        _print(console, reader.read(), store)
        return Exit.OK
    try:
        with interrupt_on_stop_signals():
            last = _follow(console, reader, store.start())
    except KeyboardInterrupt:
        return Exit.OK
    finally:
        store.stop()
    store.refresh()
    _print(console, last, store)
    return Exit.OK


def _follow(console: Console, reader: RunReader, store: StoreFollower) -> RunView:
    """Show a frame each second until the run has ended, and return the last. Raises: MegascaleError at the first"""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    view = reader.read()
    notes: list[Text] = []
    with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
        while not view.has_ended:
            lines = _lines(console, view, store, console.height - len(notes), fill=True)
            live.update(Group(*lines, *notes), refresh=True)
            time.sleep(EVERY_S)
            try:
                view, notes = reader.read(), []
            except MegascaleError as error:  # a file server was away: show what was known
                notes = [Text(str(error), style="red", no_wrap=True, overflow="ellipsis")]
    return view


def _print(console: Console, view: RunView, store: StoreFollower) -> None:
    height = console.height - 1 if console.is_terminal else LINES_OF_A_PIPE
    for line in _lines(console, view, store, height):
        console.print(line, soft_wrap=True)


def _lines(console: Console, view: RunView, store: StoreFollower, height: int, *, fill: bool = False) -> list:
    from megascale.operate.show.frame import FrameSize, frame

    size = FrameSize(console.width, height, has_blocks(console.encoding, os.environ), fill)
    analyses = store.latest
    note = store.note.removeprefix("no analyses: ") if analyses is None else store.note
    if analyses is None:
        return frame(view, (), None, size, f"none: {note}")
    return frame(view, analyses.marked, analyses.verdicts, size, note)


def has_blocks(encoding: str, env: Mapping[str, str]) -> bool:
    """Return True if the terminal shows block characters, as far as locale and encoding tell. In the C locale Python
    writes UTF-8, which nobody has asked for.
    """
    named = next((env[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if env.get(name)), "C")
    return "utf" in encoding.lower() and "utf" in named.lower()
