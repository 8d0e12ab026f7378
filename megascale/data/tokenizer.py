"""Text to token ids, behind one interface. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megascale.catalog.tokenizers import TOKENIZERS
from megascale.core.errors import DataError
from megascale.core.files import fingerprint

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>")
"""Tokens that may end a document, in order of preference."""


class Tokenizer(Protocol):
    """Ids are below `vocab_size`, and `eod` ends every document. `fingerprint` is equal for tokenizers that give equal
    ids.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, whole numbers [n], without eod."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, as far as they are text."""


class ByteTokenizer:
    """Bytes of UTF-8 are their own ids; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`. `eod`: the token that ends documents, or its id; found by its usual names if not given."""

    def __init__(self, path: Path, eod: str | int | None = None) -> None:
        from tokenizers import Tokenizer as Rust

        try:
            self._rust = Rust.from_file(str(path))
        except Exception as error:  # the library raises bare Exception, whatever is wrong
            mend = "a tokenizer.json of the tokenizers library, or " + " or ".join(TOKENIZERS.names())
            raise DataError(f"{path} is not a tokenizer: {error}", mend=mend) from None
        self._rust.no_truncation()  # a file may carry both, meant for a model's input: documents are kept whole
        self._rust.no_padding()
        self.name = str(path)
        self.vocab_size = max(self._rust.get_vocab().values(), default=-1) + 1  # ids may have gaps
        self.eod = eod if isinstance(eod, int) else self._eod_of((eod,) if eod else END_OF_DOCUMENT)
        self.fingerprint = fingerprint(path)

    def find_eod(self, candidates: Sequence[str] = END_OF_DOCUMENT) -> int | None:
        """The first of these tokens that there is."""
        ids = (self._rust.token_to_id(token) for token in candidates)
        return next((found for found in ids if found is not None), None)

    def _eod_of(self, candidates: Sequence[str]) -> int:
        found = self.find_eod(candidates)
        if found is None:
            nor = " nor ".join(candidates)
            raise DataError(f"{self.name} has no token {nor} to end documents with", mend="--eod TOKEN")
        return found

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # such as a character without a token in a vocabulary without an unknown token
            raise DataError(f"{self.name} cannot tokenize: {error}", mend="another tokenizer") from None
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._rust.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(name: str, eod: str | int | None = None) -> Tokenizer:
    """A tokenizer by its catalog name or file. `eod`: the token, or its id, that ends documents.

    Raises: DataError for a missing or unusable file, and for an `eod` that the tokenizer does not have.
    """
    if name in TOKENIZERS.cards:
        tokenizer: Tokenizer = TOKENIZERS[name].load()()
        if isinstance(eod, str):
            raise DataError(f"the tokenizer {name} ends documents in its own way", mend="leave out --eod")
        return tokenizer
    if not Path(name).is_file():
        raise DataError(
            f"there is no tokenizer file {name}", mend="a tokenizer.json, or " + " or ".join(TOKENIZERS.names())
        )
    return FileTokenizer(Path(name), eod)
