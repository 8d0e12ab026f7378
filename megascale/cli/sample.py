"""`megascale sample`: text generated from a checkpoint."""

from __future__ import annotations

import argparse

from megascale.cli.arguments import checked, non_negative_int, positive_int
from megascale.core.errors import CheckpointError, Exit


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    checkpoint_help = "folder of a checkpoint, of a run (its newest checkpoint), or of Hugging Face weights"
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=checkpoint_help)
    sub.add_argument("--prompt", type=_text, action="append", metavar="TEXT", help="text to continue; may be repeated")
    tokens = "maximum tokens to generate (default: 100)"
    sub.add_argument("--tokens", type=positive_int, default=100, metavar="N", help=tokens)
    warmth = checked("a number from 0 to 100", float, lambda number: 0 <= number < 100)
    sub.add_argument(
        "--temperature", type=warmth, default=0.8, metavar="T", help="0: always the likeliest token (default: 0.8)"
    )
    top_k = "sample from the K likeliest tokens; 0: from all (default: 50)"
    sub.add_argument("--top-k", type=non_negative_int, default=50, metavar="K", help=top_k)
    sub.add_argument("--seed", type=_seed, default=0, help="random seed (default: 0)")
    sub.add_argument(
        "--average", action="store_true", help="take the average of the weights (train.weight_average), not the weights"
    )
    sub.add_argument(
        "--tokenizer", metavar="NAME|FILE", help="tokenizer of the text (default: the tokenizer of the training run)"
    )
    sub.add_argument("--eod", metavar="TOKEN", help="token that ends a text (default: that of the training data)")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from megascale.cli.run_location import run_location

    location = run_location(options.checkpoint)  # before torch, whose import takes seconds
    from megascale.checkpoint.folders import find_checkpoint
    from megascale.convert.generate import SamplingParams, generate_text
    from megascale.convert.huggingface import weights_folder
    from megascale.device import detect_device

    params = SamplingParams(
        options.tokens, options.temperature, options.top_k, options.seed, options.tokenizer, options.eod
    )
    source = location if weights_folder(location.local_path) else find_checkpoint(location)
    prompts, device = options.prompt or [""], detect_device().torch_device
    try:
        for text in generate_text(source, prompts, params, device, options.average):
            print(text, flush=True)
    except OSError as error:
        message = f"cannot write the weights for transformers: {error.filename or ''} {error.strerror}"
        raise CheckpointError(message, hint="set TMPDIR to a folder with more space") from None
    return Exit.OK


def _text(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8")
    return text


def _seed(text: str) -> int:
    if (number := non_negative_int(text)) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is not below 2^63")
    return number
