"""Rules of times that must nest: those of `[launch]`, `[checkpoint]`, `[fault]` and NCCL's retries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megascale.config.finding import Finding, Rule
from megascale.config.injection_rules import unknown_ranks
from megascale.config.run import RunConfig


def timeouts(c: Any) -> Iterator[Finding]:
    """Check that start_timeout_s covers the other timeouts."""
    start, retry_timeout = c.launch.start_timeout_s, c.checkpoint.retry_timeout_s
    if start < c.launch.timeout_s:
        message = f"{start} s is less than launch.timeout_s = {c.launch.timeout_s}"
        yield Finding("launch.start_timeout_s", message, f"{c.launch.timeout_s} or more")
    if c.checkpoint.every and start <= retry_timeout:
        message = (
            f"{start} s is no more than checkpoint.retry_timeout_s = {retry_timeout}, which a rank may spend on a save"
        )
        yield Finding("launch.start_timeout_s", message, f"more than {retry_timeout}")


def fault_times(c: Any) -> Iterator[Finding]:
    """Check that the times of `[fault]` nest: heartbeat < flap < lost node, and no verdict before a heartbeat."""
    f = c.fault
    for short, long in (("poll_s", "hang_s"), ("heartbeat_s", "node_lost_s"), ("flap_s", "node_lost_s")):
        low, high = getattr(f, short), getattr(f, long)
        if low >= high:
            yield Finding(f"fault.{long}", f"{high} s is no more than fault.{short} = {low}", f"more than {low}")
    for key in ("start_hang_s", "evaluation_hang_s", "checkpoint_hang_s"):
        if (bound := getattr(f, key)) < f.hang_s:
            yield Finding(f"fault.{key}", f"{bound} s is less than fault.hang_s = {f.hang_s}", f"{f.hang_s} or more")


def launch_findings(c: RunConfig) -> Iterator[Finding]:
    """Check, for a job with a driver, that a rank's own timeouts are longer than what the driver needs for a verdict,
    that an adapter retries for longer than a flap, and that ranks with injected faults exist. `c`: resolved
    """
    yield from unknown_ranks(c, c.world_size)
    f, launch = c.fault, c.launch
    for key, limit in (
        ("hang_s", "timeout_s"), ("node_lost_s", "timeout_s"), ("evaluation_hang_s", "timeout_s"),
        ("start_hang_s", "start_timeout_s"), ("checkpoint_hang_s", "start_timeout_s"),
    ):  # fmt: skip
        bound, timeout = getattr(f, key), getattr(launch, limit)
        if bound + f.evidence_s >= timeout:
            message = f"{timeout} s: ranks would give up before the verdict, fault.{key} + fault.evidence_s"
            yield Finding(f"launch.{limit}", message, f"more than {bound + f.evidence_s:g}")
    if c.checkpoint.every and f.checkpoint_hang_s <= (retry := c.checkpoint.retry_timeout_s):
        message = f"{f.checkpoint_hang_s} s is no more than checkpoint.retry_timeout_s = {retry}"
        yield Finding("fault.checkpoint_hang_s", message, f"more than {retry}")
    if (patience := c.nccl.ib_patience_s) <= f.flap_s:
        message = f"adapters give up after {patience:.3g} s, within a flap of fault.flap_s = {f.flap_s}"
        yield Finding("nccl.ib_timeout", message, "a larger exponent")
    elif patience >= launch.timeout_s:
        message = f"adapters retry for {patience:.3g} s, longer than launch.timeout_s = {launch.timeout_s}"
        yield Finding("nccl.ib_timeout", message, "a smaller exponent, or a longer launch.timeout_s")


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("launch", "checkpoint"), timeouts),
    (("fault",), fault_times),
)
"""(sections that the rule reads, rule), as in `rules`."""
