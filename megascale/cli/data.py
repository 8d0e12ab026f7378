"""`megascale data`: prepare and inspect token datasets; each verb is in a module of its own."""

from __future__ import annotations

import argparse

from megascale.cli import data_import, data_index, data_inspect, data_prepare, data_which

VERBS = {
    "prepare": (data_prepare, "tokenize text, .jsonl or .parquet files to a token dataset"),
    "import": (data_import, "convert token files of another project to a token dataset"),
    "index": (data_index, "build the sample indices of a run in advance"),
    "which": (data_which, "name the documents that a step of a run has read"),
    "inspect": (data_inspect, "describe a token dataset and show some text"),
}


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    verbs = sub.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (module, help_line) in VERBS.items():
        module.add_arguments(verbs.add_parser(name, help=help_line))


def run(options: argparse.Namespace) -> int:
    """Run the verb and return its exit status."""
    return int(VERBS[options.verb][0].run(options))
