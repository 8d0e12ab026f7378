"""`megascale data teacher`: soft labels of a checkpoint for the samples of a run, to distill from."""

from __future__ import annotations

import argparse

from megascale.cli.arguments import add_config_arguments, local_path
from megascale.cli.run_location import run_location
from megascale.config.loading import load_config
from megascale.core.errors import DataError, Exit
from megascale.core.units import format_bytes


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_config_arguments(sub)
    checkpoint = "the teacher: folder or URL of a checkpoint, or of a run (its newest checkpoint)"
    sub.add_argument("--checkpoint", metavar="CHECKPOINT", required=True, help=checkpoint)
    sub.add_argument("--output", metavar="FILE", type=local_path, required=True, help="file of the soft labels")


def run(options: argparse.Namespace) -> int:
    """Run the verb and return its exit status."""
    config = load_config(options.config, [*options.overrides, "train.distill_teacher=mock"])  # no file to read yet
    location, path = run_location(options.checkpoint), options.output
    from megascale.checkpoint.folders import find_checkpoint
    from megascale.convert.huggingface import PretrainedWeights
    from megascale.train.teacher_labels import write_teacher

    try:
        header = write_teacher(config, find_checkpoint(location), path, PretrainedWeights)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}", hint="see the file system") from None
    labels = f"{header.top_k} tokens for each label of {header.samples} samples"
    print(f"{path}: {format_bytes(header.file_bytes)}, {labels}")
    return Exit.OK
