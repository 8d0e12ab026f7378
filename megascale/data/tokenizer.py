"""Text to token ids, behind one interface. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megascale.catalog.tokenizers import TOKENIZERS
from megascale.core.errors import DataError
from megascale.core.files import fingerprint

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>")
"""Tokens that may end a document, in order of preference."""


class Tokenizer(Protocol):
    """`eod` ends every document. `fingerprint` is equal for tokenizers that give equal ids."""

    name: str
    vocab_size: int
    eod: int
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without eod."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, as far as they are text."""


class ByteTokenizer:
    """Bytes of UTF-8 are their own ids; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`. `eod`: the token that ends documents, found by its usual names if not given."""

    def __init__(self, path: Path, eod: str | None = None) -> None:
        from tokenizers import Tokenizer as Rust

        try:
            self._rust = Rust.from_file(str(path))
        except Exception as error:  # the library raises bare Exception, whatever is wrong
            mend = "a tokenizer.json of the tokenizers library, or " + " or ".join(TOKENIZERS.names())
            raise DataError(f"{path} is not a tokenizer: {error}", mend=mend) from None
        candidates = (eod,) if eod else END_OF_DOCUMENT
        found = [i for i in map(self._rust.token_to_id, candidates) if i is not None]
        if not found:
            raise DataError(f"{path} has no token {' nor '.join(candidates)} to end documents with", mend="--eod TOKEN")
        self.name = str(path)
        self.vocab_size = self._rust.get_vocab_size()
        self.eod = found[0]
        self.fingerprint = fingerprint(path)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._rust.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(name: str, eod: str | None = None) -> Tokenizer:
    """A tokenizer by its catalog name or file.

    Raises: DataError for a missing or unusable file.
    """
    if name in TOKENIZERS.cards:
        return TOKENIZERS[name].load()()
    if not Path(name).is_file():
        raise DataError(
            f"there is no tokenizer file {name}", mend="a tokenizer.json, or " + " or ".join(TOKENIZERS.names())
        )
    return FileTokenizer(Path(name), eod)
