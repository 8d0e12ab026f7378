"""Arguments of `megascale plan --lengths`, for sequences of unequal lengths (`cli.plan_lengths`)."""

from __future__ import annotations

import argparse

from megascale.cli.argument_types import positive_int
from megascale.config.section import AUTO

NOT_WITH_LENGTHS = ("search", "exact", "sweep", "timeline", "plot", "tokens")
"""Options of plans for sequences of one length."""


def add_length_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    group = sub.add_argument_group("sequences of unequal lengths")
    drawn = "plan steps drawn from a distribution, such as lognormal:median=2000,sigma=1.8, or from a dataset's PREFIX"
    group.add_argument("--lengths", metavar="KIND:KEY=VALUE,...", help=drawn)
    most = "tokens of a rank in a micro-batch (default: the most that fit in memory)"
    group.add_argument("--max-tokens-per-rank", type=positive_int, metavar="N", help=most)
    chunk = (
        "also plan chunks of N tokens, which depend on each other in long sequences; auto: the fastest N and K that fit"
    )
    group.add_argument("--chunk-tokens", type=_tokens_or_auto, metavar="N|auto", default=0, help=chunk)
    keep = "chunks of a sequence that keep their activations (default: 1)"
    group.add_argument("--keep-chunks", type=positive_int, metavar="K", default=1, help=keep)
    group.add_argument("--length-steps", type=positive_int, metavar="N", default=4, help="steps to draw (default: 4)")


def refused_with_lengths(options: argparse.Namespace) -> str:
    """Say which given options do not go with `--lengths`; empty if all do."""
    unfit = [f"--{name}" for name in NOT_WITH_LENGTHS if options.lengths and getattr(options, name)]
    return f"--lengths plans the layout of CONFIG: leave out {' and '.join(unfit)}" if unfit else ""


def _tokens_or_auto(text: str) -> int | str:
    return AUTO if text == AUTO else positive_int(text)
