"""`megascale sample`: what a checkpoint writes."""

from __future__ import annotations

import argparse

from megascale.cli.numbers import count, whole
from megascale.core.errors import CheckpointError, Exit


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    found = "a checkpoint's folder, a run's, whose newest is meant, or weights in Hugging Face's layout"
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=found)
    sub.add_argument("--prompt", action="append", metavar="TEXT", help="what to go on from; as often as you like")
    sub.add_argument("--tokens", type=count, default=100, metavar="N", help="how many to write at most (100)")
    sub.add_argument("--temperature", type=_positive, default=0.8, help="0: always the likeliest token (0.8)")
    sub.add_argument("--top-k", type=whole, default=50, metavar="K", help="draw one of the K likeliest; 0: all (50)")
    sub.add_argument("--seed", type=_seed, default=0, help="another one, another text (0)")
    sub.add_argument("--tokenizer", metavar="NAME|FILE", help="(the one that it was trained with)")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from megascale.checkpoint.storage import Location
    from megascale.convert.sample import Wish, find, sample
    from megascale.device import detect

    wish = Wish(options.tokens, options.temperature, options.top_k, options.seed)
    source = find(Location(options.checkpoint))
    try:
        for text in sample(source, options.prompt or [""], wish, options.tokenizer, detect().torch):
            print(text, flush=True)
    except OSError as error:
        what = f"cannot write the weights for transformers: {error.filename or ''} {error.strerror}"
        raise CheckpointError(what, mend="TMPDIR=FOLDER with more space") from None
    return Exit.OK


def _seed(text: str) -> int:
    if (number := whole(text)) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is not below 2^63")
    return number


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return number
