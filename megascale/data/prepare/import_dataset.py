"""`megascale data import`: a dataset of another project, copied into our format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale.core.errors import DataError
from megascale.data.prepare.dataset_writer import DatasetWriter, check_output, token_dtype
from megascale.data.prepare.foreign_formats import Block, open_foreign
from megascale.data.prepare.inputs import explained
from megascale.data.prepare.tokenizer import Tokenizer, load_tokenizer
from megascale.data.read.indexed_dataset import DatasetInfo, TokenizerInfo


@dataclass(frozen=True)
class ImportRequest:
    """The arguments of `megascale data import`. `tokenizer`: the one that made the tokens, recorded in the dataset.
    `eod`: the id that ends documents, by default the tokenizer's. `dtype`: of raw tokens. `key`: column of token ids.
    """

    inputs: Sequence[Path]
    output: Path
    tokenizer: str | None = None
    eod: int | None = None
    dtype: str | None = None
    key: str = "input_ids"


@dataclass(frozen=True)
class ImportedDataset:
    """The result: the dataset and the formats of the input."""

    dataset: DatasetInfo
    formats: list[str]


def import_dataset(request: ImportRequest) -> ImportedDataset:
    """Write `request.output`.bin and .idx, and with a tokenizer .json.

    Raises: DataError for files in no known format, that are damaged, or whose tokens cannot be stored, and for an
    output that cannot be written or would replace an input
    """
    tokenizer = load_tokenizer(request.tokenizer, request.eod) if request.tokenizer else None
    eod = request.eod if request.eod is not None or tokenizer is None else tokenizer.eod
    files = [open_foreign(path, request.dtype, request.key) for path in request.inputs]
    if divided := next((file for file in files if file.divided and eod is None), None):
        what = f"{divided.path} does not say where documents end"
        raise DataError(what, hint="--eod ID, the token that ends them, or --tokenizer")

    def blocks() -> Iterator[Block]:
        for file in files:
            with explained(str(file.path)):
                yield from file.read()

    sources = [path for file in files for path in file.files]
    check_output(request.output, [*sources, Path(request.tokenizer or "")])
    info = _copy(request.output, blocks, eod, tokenizer)
    return ImportedDataset(info, list(dict.fromkeys(file.format for file in files)))


def _copy(
    output: Path, blocks: Callable[[], Iterator[Block]], eod: int | None, tokenizer: Tokenizer | None
) -> DatasetInfo:
    """Write all blocks. Tokens are read twice without a tokenizer: the highest decides their dtype."""
    origin: TokenizerInfo | None = None
    if tokenizer:
        vocab_size = tokenizer.vocab_size
        origin = TokenizerInfo(tokenizer.name, tokenizer.fingerprint, tokenizer.eod, tokenizer.eod_origin)
    else:
        highest = max((int(tokens.max()) for tokens, _ in blocks() if len(tokens)), default=0)
        if highest >= 2**31 - 1:
            raise DataError(f"token {highest} is beyond 31 bits", hint="another --dtype, or another file")
        vocab_size = highest + 1
    with DatasetWriter(output, token_dtype(vocab_size)) as writer:
        try:
            open_tokens = 0  # of a document that goes on in the next block, or in the next file
            for tokens, known in blocks():
                if len(tokens) and int(tokens.min()) < 0:
                    raise DataError(f"token {tokens.min()} is negative", hint="another --dtype, or another file")
                if known is None:
                    ends = np.flatnonzero(tokens == eod) + 1
                    lengths = np.diff(ends, prepend=-open_tokens)
                    open_tokens = len(tokens) - int(ends[-1]) if len(ends) else open_tokens + len(tokens)
                elif open_tokens:
                    writer.append(tokens[:0], np.array([open_tokens]))
                    open_tokens = 0
                writer.append(tokens, lengths if known is None else known, vocab_size)
            if open_tokens:
                writer.append(np.empty(0, dtype=np.int64), np.array([open_tokens]))
            return writer.commit(origin, vocab_size)
        except BaseException:
            writer.discard()
            raise
