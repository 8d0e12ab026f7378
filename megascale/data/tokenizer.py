"""Tokenizers: text to token ids and back. No torch.

Tokenizer: the interface. ByteTokenizer, FileTokenizer: its implementations. load_tokenizer: load by name or file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megascale.catalog.tokenizers import TOKENIZERS
from megascale.core.errors import DataError
from megascale.core.files import fingerprint

EOD_CANDIDATES = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>")
"""End-of-document tokens, in order of preference."""


class Tokenizer(Protocol):
    """The interface of a tokenizer. Ids are below `vocab_size`; `eod` is the end-of-document id; tokenizers with equal
    fingerprints produce equal ids.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token ids [n] (integers) of every text, without eod."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; ids that are no text are dropped or replaced."""


class ByteTokenizer:
    """A tokenizer whose ids are the bytes of UTF-8; id 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`. `eod`: the end-of-document token, or its id; the first of EOD_CANDIDATES if not given."""

    def __init__(self, path: Path, eod: str | int | None = None) -> None:
        from tokenizers import Tokenizer as Rust

        try:
            self._rust = Rust.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every error
            hint = "a tokenizer.json of the tokenizers library, or " + " or ".join(TOKENIZERS.names())
            raise DataError(f"{path} is not a tokenizer: {error}", hint=hint) from None
        self._rust.no_truncation()  # a file may configure truncation and padding, which are for a model's input
        self._rust.no_padding()
        self.name = str(path)
        self.vocab_size = max(self._rust.get_vocab().values(), default=-1) + 1  # ids may have gaps
        self.eod = eod if isinstance(eod, int) else self._require_eod((eod,) if eod else EOD_CANDIDATES)
        self.fingerprint = fingerprint(path)

    def find_eod(self, candidates: Sequence[str] = EOD_CANDIDATES) -> int | None:
        """The id of the first candidate in the vocabulary, or None."""
        ids = (self._rust.token_to_id(token) for token in candidates)
        return next((eod for eod in ids if eod is not None), None)

    def _require_eod(self, candidates: Sequence[str]) -> int:
        eod = self.find_eod(candidates)
        if eod is None:
            nor = " nor ".join(candidates)
            raise DataError(f"{self.name} has no token {nor} to end documents with", hint="--eod TOKEN")
        return eod

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # such as a character without a token in a vocabulary without an unknown token
            raise DataError(f"{self.name} cannot tokenize: {error}", hint="another tokenizer") from None
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._rust.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(name: str, eod: str | int | None = None) -> Tokenizer:
    """Load a tokenizer by its catalog name or file. `eod`: the end-of-document token, or its id.

    Raises: DataError for a missing or unusable file, and for an `eod` that the tokenizer lacks.
    """
    if name in TOKENIZERS.cards:
        tokenizer: Tokenizer = TOKENIZERS[name].load()()
        if isinstance(eod, str):
            raise DataError(f"the tokenizer {name} has a fixed end-of-document token", hint="leave out --eod")
        return tokenizer
    if not Path(name).is_file():
        hint = "a tokenizer.json, or " + " or ".join(TOKENIZERS.names())
        raise DataError(f"there is no tokenizer file {name}", hint=hint)
    return FileTokenizer(Path(name), eod)
