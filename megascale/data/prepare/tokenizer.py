"""Tokenizers: text to token ids and back. No torch.

Tokenizer: the interface. ByteTokenizer, FileTokenizer: its implementations. load_tokenizer: load by name or file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megascale.catalog.data import TOKENIZERS
from megascale.core.errors import DataError
from megascale.core.files import fingerprint, is_file, why_unreadable
from megascale.data.prepare.special_tokens import SpecialToken, find_special_token, missing_added_tokens


class Tokenizer(Protocol):
    """The interface of a tokenizer. Ids are below `vocab_size`; `eod` is the end-of-document id, `eod_origin` the file
    that names it; `bos` is the id that begins a text, or None; tokenizers with equal fingerprints produce equal ids.
    """

    name: str
    vocab_size: int
    eod: int
    eod_origin: str
    fingerprint: str

    @property
    def bos(self) -> int | None: ...

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token ids [n] (integers) of every text, without eod."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; ids that are no text are dropped or replaced."""


class ByteTokenizer:
    """A tokenizer whose ids are the bytes of UTF-8; id 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    eod_origin = "fixed"
    bos = None
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` and the special tokens that files beside it name (`special_tokens`). `eod`: the
    end-of-document token, or its id; by default the token that ends a text for these files.
    """

    def __init__(self, path: Path, eod: str | int | None = None) -> None:
        from tokenizers import Tokenizer as Rust

        try:
            self._rust = Rust.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every error
            hint = "a tokenizer.json of the tokenizers library, or " + " or ".join(TOKENIZERS.names())
            raise DataError(f"{path} is not a tokenizer: {error}", hint=hint) from None
        self._path = path
        self._rust.no_truncation()  # a file may configure truncation and padding, which are for a model's input
        self._rust.no_padding()
        self.name = str(path)
        self.vocab_size = max(self._rust.get_vocab().values(), default=-1) + 1  # ids may have gaps
        self.fingerprint = fingerprint(path)
        if missing := missing_added_tokens(self._rust, path.parent):
            what = f"{path} lacks {len(missing)} tokens that files beside it add: {', '.join(missing[:3])}"
            hint = "save it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            raise DataError(what, hint=hint)
        self.eod, self.eod_origin = (eod, "given") if isinstance(eod, int) else self._find_eod(eod)

    def _find_eod(self, given: str | None) -> tuple[int, str]:
        """The end-of-document id and its origin.

        Raises: DataError for a token that is missing, and where no file decides
        """
        if given is not None:
            if (id := self._rust.token_to_id(given)) is None:
                raise DataError(f"{self.name} has no token {given} to end documents with", hint="--eod TOKEN")
            return id, "given"
        if found := self.named_eod:
            return found.id, found.origin
        specials = [token.content for token in self._rust.get_added_tokens_decoder().values() if token.special]
        some = ", ".join(specials[:8]) + (", ..." if len(specials) > 8 else "") or "none"
        what = f"{self.name} does not say which token ends a document, and no file beside it: its special tokens are"
        raise DataError(f"{what} {some}", hint="--eod TOKEN")

    @property
    def named_eod(self) -> SpecialToken | None:
        """The token that ends a text, as the files name it; None where none does."""
        return find_special_token(self._rust, self._path, "eos")

    def token(self, id: int) -> str:
        return self._rust.id_to_token(id) or ""

    @property
    def bos(self) -> int | None:
        found = find_special_token(self._rust, self._path, "bos")
        return found.id if found else None

    @property
    def frames_with_bos(self) -> bool:
        """True if the file's own post-processor begins a model's input with `bos`."""
        ids = self._rust.encode("", add_special_tokens=True).ids
        return bool(ids) and ids[0] == self.bos

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # such as a character without a token in a vocabulary without an unknown token
            raise DataError(f"{self.name} cannot tokenize: {error}", hint="another tokenizer") from None
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._rust.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=False)


def load_tokenizer(name: str, eod: str | int | None = None) -> Tokenizer:
    """Load a tokenizer by its catalog name or file. `eod`: the end-of-document token, or its id.

    Raises: DataError for a missing or unusable file, and for an `eod` that the tokenizer lacks.
    """
    if name in TOKENIZERS.cards:
        tokenizer: Tokenizer = TOKENIZERS[name].load()()
        if isinstance(eod, str):
            raise DataError(f"the tokenizer {name} has a fixed end-of-document token", hint="leave out --eod")
        return tokenizer
    if reason := why_unreadable(name):
        hint = "a tokenizer.json, or " + " or ".join(TOKENIZERS.names())
        raise DataError(reason, hint=f"did you mean {file}?" if is_file(file := Path(name, "tokenizer.json")) else hint)
    return FileTokenizer(Path(name), eod)
