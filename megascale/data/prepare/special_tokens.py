"""Special tokens of a tokenizer file: what the files beside it say, and what it says itself. No torch.

SpecialToken: a token id, and the file that names the token. find_special_token: the end or the beginning of a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megascale.core.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Rust

USUAL_NAMES = {
    "eos": ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>"),
    "bos": ("<|begin_of_text|>", "<s>", "<bos>"),
}
"""Names of special tokens that end and begin a text, for a tokenizer without files beside it."""

TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files with tokens by kind, such as `eos_token`. The first takes precedence, as in transformers."""

ID_FILES = ("generation_config.json", "config.json")
"""Files with ids by kind, such as `eos_token_id`, which may be a list of several."""


@dataclass(frozen=True)
class SpecialToken:
    """The id of a special token, and its origin, such as "eos_token of tokenizer_config.json"."""

    id: int
    origin: str


def find_special_token(rust: Rust, path: Path, kind: Literal["eos", "bos"]) -> SpecialToken | None:
    """The token of `kind` for the tokenizer file at `path`; None where no file decides.

    In this order: the token in tokenizer_config.json or special_tokens_map.json, a single id in generation_config.json
    or config.json, and the only special token of the tokenizer with a usual name. A name alone is no evidence: an
    ordinary token of that name, such as the HTML tag `</s>`, stays ordinary.

    Raises: DataError for a file that is unreadable, or names a token that the tokenizer lacks
    """
    specials = {id: token.content for id, token in rust.get_added_tokens_decoder().items() if token.special}
    for name in TOKEN_FILES:
        token = _read(path.parent / name).get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token  # an added token
        if isinstance(token, str):
            if (id := rust.token_to_id(token)) is None:
                what = f"{path.parent / name} names the {kind}_token {token!r}, which {path} lacks"
                raise DataError(what, hint="the tokenizer.json that belongs to the file, or --eod TOKEN")
            return SpecialToken(id, f"{kind}_token of {name}")
    for name in ID_FILES:
        keys = _read(path.parent / name)
        text = keys.get("text_config")  # a multimodal model keeps the ids of its text apart
        ids = keys.get(f"{kind}_token_id", text.get(f"{kind}_token_id") if isinstance(text, dict) else None)
        ids = ids if isinstance(ids, list) else [ids]
        if len(ids) == 1 and ids[0] in specials:
            return SpecialToken(ids[0], f"{kind}_token_id of {name}")
    usual = [id for id, content in specials.items() if content in USUAL_NAMES[kind]]
    return SpecialToken(usual[0], f"the one special token of a usual name in {path.name}") if len(usual) == 1 else None


def missing_added_tokens(rust: Rust, folder: Path) -> list[str]:
    """Tokens that the files beside a tokenizer add to its vocabulary, and that it lacks.

    Raises: DataError for an unreadable file
    """
    decoder = _read(folder / "tokenizer_config.json").get("added_tokens_decoder")
    entries = decoder.values() if isinstance(decoder, dict) else []
    added = [entry.get("content") for entry in entries if isinstance(entry, dict)]
    added += _read(folder / "added_tokens.json")
    return [token for token in dict.fromkeys(added) if isinstance(token, str) and rust.token_to_id(token) is None]


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file.

    Raises: DataError for a file that is unreadable, or no JSON object
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="correct or remove the file") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object", hint="correct or remove the file")
    return value
