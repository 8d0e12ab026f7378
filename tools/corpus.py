#!/usr/bin/env python3
"""Make a corpus from the sources of Python's standard library, and train a tokenizer on the corpus.

Writes train.jsonl, valid.jsonl (one module in twenty) and tokenizer.json. The files depend only on the Python version.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from megascale.cli.parsing import CommandParser
from megascale.core.errors import DataError, Exit
from megascale.data.prepare.python_corpus import make_corpus


def main() -> int:
    """Run the tool."""
    arguments = CommandParser(
        "tools/corpus.py", __doc__ or "", "python tools/corpus.py --output data/quickstart", "docs/data.md"
    )
    arguments.add_argument(
        "--output", type=Path, default=Path("data/quickstart"), help="folder (default: data/quickstart)"
    )
    arguments.add_argument("--vocab-size", type=int, default=4096, help="tokens of the vocabulary (default: 4096)")
    options = arguments.parse_args()
    try:
        make_corpus(Path(sysconfig.get_path("stdlib")), options.output, options.vocab_size)
    except DataError as error:
        print(error, file=sys.stderr)
        return int(error.exit_status)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}  -> give another --output", file=sys.stderr)
        return int(Exit.DATA)
    return 0


if __name__ == "__main__":
    sys.exit(main())
