"""Rules of training across sites."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.config.exclusions import Exclusions, only, unless
from megascale.config.finding import Finding
from megascale.config.sites import SitesConfig
from megascale.config.train import TrainConfig

SEVERAL_SITES = Exclusions("sites.count", unless(1), (
    ("optimizer.master_weights", only("full"), "compensated weights have no outer steps ({name} = {given})", "full"),
    ("parallel.hybrid_dp", only(False), "planned micro-batches do not divide over sites ({name} = {given})", "false"),
    ("data.reader", unless("host"), "a host's reader does not follow a site that comes back ({name} = {given})",
     "rank"),
    ("data.blend_policy", only(None), "sites would find different weights ({name} = {given})", "remove the key"),
    ("fault.shrink", only(False), "sites have the same layout ({name} = {given})", "false"),
))  # fmt: skip

ONE_SITE = Exclusions("sites.count", only(1), tuple(
    (f"sites.{name}", only(SitesConfig.model_fields[name].default), "has no effect with one site",
     "sites.count above 1, or remove the key")
    for name in SitesConfig.model_fields if name != "count"
))  # fmt: skip
"""Keys without effect after an override of the command line has left one site: worth a warning."""

NOTHING_LEFT_OVER = Exclusions("sites.is_lossy", only(False), (
    ("sites.error_decay", only(SitesConfig.model_fields["error_decay"].default),
     "has no effect: with top_k = 1 and bits = 32 everything is sent", "remove the key"),
))  # fmt: skip


def meeting(sites: SitesConfig) -> Iterator[Finding]:
    """Check the place of this job among the sites, and the address at which they meet."""
    if sites.count == 1:
        return
    if sites.index >= sites.count:
        yield Finding("sites.index", f"there is no site {sites.index} of {sites.count}", f"0 to {sites.count - 1}")
    try:
        assert sites.place
    except ValueError:
        what = f"{sites.address!r} is no host:port" if sites.address else "the sites need a meeting point"
        yield Finding("sites.address", what, "host:port of a host where `megascale sites host:port` runs")


def outer_steps(sites: SitesConfig) -> Iterator[Finding]:
    """Check that outer steps follow each other, and that error feedback has no momentum beside it."""
    if sites.fragments > sites.every:
        what = f"{sites.fragments} fragments need as many steps, and every = {sites.every}"
        yield Finding("sites.fragments", what, f"at most {sites.every}, or more steps in sites.every")
    elif sites.overlap >= (distance := sites.every // sites.fragments):
        what = f"{sites.overlap} steps reach the next exchange, {distance} steps later"
        yield Finding("sites.overlap", what, f"at most {distance - 1}")
    if sites.top_k < 1 and sites.outer_momentum:
        what = f"{sites.outer_momentum:g} beside top_k = {sites.top_k:g}, whose error feedback is the momentum"
        yield Finding("sites.momentum", what, "0, or top_k = 1")


def late_outer_step(train: TrainConfig, sites: SitesConfig) -> Iterator[Finding]:
    """Warn of a training that ends before its first outer step is due."""
    if sites.count > 1 and sites.every > train.steps:
        message = f"= {sites.every} is more than train.steps: the only outer step follows the last one"
        yield Finding("sites.every", message, f"at most {train.steps}")
