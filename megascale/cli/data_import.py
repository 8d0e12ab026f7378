"""`megascale data import`: token files of another project as a token dataset."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

from megascale.cli.arguments import add_json, local_path
from megascale.core.errors import Exit
from megascale.core.units import format_count
from megascale.data.prepare.import_dataset import ImportRequest, import_dataset


def add_arguments(make: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    kinds = ".bin, .npy, .parquet or .arrow of tokens, a prefix of .bin and .idx, or a folder of LitData"
    make.add_argument("inputs", metavar="INPUT", nargs="+", type=Path, help=kinds)
    output = "path of the dataset, without suffix"
    make.add_argument("--output", metavar="PREFIX", type=local_path, required=True, help=output)
    make.add_argument("--tokenizer", metavar="NAME|FILE", help="the tokenizer of the tokens, to record in the dataset")
    eod = "id of the token that ends documents (default: the tokenizer's)"
    make.add_argument("--eod", metavar="ID", type=int, help=eod)
    make.add_argument("--dtype", choices=("uint8", "uint16", "uint32", "int32", "int64"), help="dtype of raw tokens")
    column = "column of .parquet and .arrow (default: input_ids)"
    make.add_argument("--key", metavar="COLUMN", default="input_ids", help=column)
    add_json(make)


def run(options: argparse.Namespace) -> int:
    """Run the verb and return its exit status."""
    made = import_dataset(ImportRequest(**{one.name: getattr(options, one.name) for one in fields(ImportRequest)}))
    info = made.dataset
    if options.json:
        print(json.dumps({"documents": info.documents, "tokens": info.tokens, "formats": made.formats}))
        return Exit.OK
    sizes = f"{format_count(info.documents)} documents, {format_count(info.tokens)} tokens"
    print(f"{options.output}: {sizes} from {' and '.join(made.formats)}")
    if options.tokenizer is None:
        print("no tokenizer is recorded: `megascale check` cannot compare it with those of other datasets")
    return Exit.OK
