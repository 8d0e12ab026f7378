"""`megascale sites`: the meeting point of a training across sites, which none of the sites keeps. No torch."""

from __future__ import annotations

import argparse
import contextlib
import os

from megascale.cli.arguments import checked
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.limits import raise_soft_limits
from megascale.core.network import is_loopback, join_port, listen, listen_as, split_port
from megascale.core.process import interrupt_on_stop_signals
from megascale.operate.channel.secret import sites_secret
from megascale.operate.channel.store_server import StoreServer


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    place = checked("host:port", split_port)
    sub.add_argument("address", metavar="HOST:PORT", type=place, help="where to listen: sites.address of every site")


def run(options: argparse.Namespace) -> int:
    """Serve the meetings until Ctrl-C or SIGTERM. The secret is in the environment."""
    raise_soft_limits()
    secret = sites_secret()
    host, port = options.address
    try:
        listener = (listen if is_loopback(host) else listen_as)(host, port)
    except OSError as error:
        what = f"cannot listen at {join_port(host, port)}: {error.strerror or error}"
        hint = "an address of this host, and a port that is free"
        raise ConfigError([Problem("command line", "HOST:PORT", what, hint)]) from None
    print(f"sites meet at {join_port(host, listener.getsockname()[1])}", flush=True)
    never, kept = os.pipe()
    with contextlib.suppress(KeyboardInterrupt), interrupt_on_stop_signals():
        StoreServer(listener, secret).run(never)
    os.close(kept)
    return Exit.OK
