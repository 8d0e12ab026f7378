"""`megascale ckpt grow`, a larger model's checkpoint, and `megascale ckpt spectrum`, the weights to train further."""

from __future__ import annotations

import argparse
import json

from megascale.cli.arguments import add_json, checked, local_path
from megascale.cli.command_output import OutputError, warn
from megascale.cli.run_location import run_location
from megascale.config.loading import load_config
from megascale.core.errors import Exit
from megascale.core.files import exists, write_text
from megascale.core.storage import Location
from megascale.core.units import format_bytes

SHARE = checked("a share above 0 and below 1", float, lambda number: 0 < number < 1)


def add_grow(sub: argparse.ArgumentParser) -> None:
    """Declare the arguments of `ckpt grow`."""
    sub.add_argument("source", metavar="FROM", help="folder or URL of a checkpoint, or of a run (its newest)")
    sub.add_argument("config", metavar="TO.toml", help="configuration of the run that goes on, with the larger model")
    sub.add_argument("output", metavar="DIR", type=local_path, help="a new folder for the result")


def add_spectrum(sub: argparse.ArgumentParser) -> None:
    """Declare the arguments of `ckpt spectrum`."""
    sub.add_argument("source", metavar="CHECKPOINT", help="folder or URL of a checkpoint, or of a run")
    top = "share of the weights of each kind that are trained, those with the largest SNR (default: 0.5)"
    sub.add_argument("--top", metavar="SHARE", type=SHARE, default=0.5, help=top)
    output = "write [train] with freeze, the weights that are not, for `extends`"
    sub.add_argument("--output", metavar="FILE.toml", type=local_path, help=output)
    add_json(sub)


def grow(options: argparse.Namespace) -> int:
    """Write the grown checkpoint."""
    from megascale.checkpoint import folders
    from megascale.convert import grown_checkpoint

    if exists(options.output):
        raise OutputError(f"{options.output} is there already", hint="give a new folder for the result")
    config = load_config(options.config, skip_sections=["data"])
    source = folders.find_checkpoint(run_location(options.source))
    anew = grown_checkpoint.grow(source, options.output, config.model, config.train.seed, options.config)
    warn(anew)
    print(f"{options.output}: {format_bytes(Location(str(options.output)).size())}")
    return Exit.OK


def spectrum(options: argparse.Namespace) -> int:
    """Print the SNR of the weights, and write a file that freezes those with the smaller ones."""
    from megascale.checkpoint import folders
    from megascale.config.toml_writer import section_to_toml
    from megascale.convert.spectrum import frozen_tensors, measure

    kinds = measure(folders.find_checkpoint(run_location(options.source)))
    frozen = frozen_tensors(kinds, options.top)
    if options.output is not None:
        write_text(options.output, section_to_toml("train", {"freeze": frozen}) + "\n")
    if options.json:
        snr = {name: each.snr for modules in kinds.values() for each in modules for name in each.tensors}
        print(json.dumps({"snr": snr, "freeze": frozen}))
        return Exit.OK
    for kind, modules in kinds.items():
        print(f"{kind} ", ", ".join(f"{each.snr:.3g}{'' if each.tensors[0] in frozen else ' *'}" for each in modules))
    print("SNR by layer; *: trained" + (f"; {options.output} freezes the others" if options.output else ""))
    return Exit.OK
