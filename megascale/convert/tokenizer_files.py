"""The tokenizer of a Hugging Face folder, and the ids that begin and end its texts."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.catalog.data import TOKENIZERS
from megascale.checkpoint.companions import DATA_TOKENIZER, SOURCE_CONFIG, TOKENIZER_FILES
from megascale.checkpoint.format import manifest
from megascale.config.model import ModelConfig
from megascale.core.errors import CheckpointError, DataError
from megascale.core.files import exists, fingerprint, is_file, why_unreadable, write_text
from megascale.core.storage import Location
from megascale.data.prepare.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
from megascale.data.read.indexed_dataset import TokenizerInfo

ID_FILES = ("generation_config.json", "config.json")
"""Files that may have `eos_token_id`: an id, or a list of ids, each of which ends a text. The first counts."""


@dataclass(frozen=True)
class FramedTokenizer:
    """A tokenizer, the id that begins a text, if any, and the ids that end one."""

    tokenizer: Tokenizer
    bos: int | None
    stop: list[int]


def add_tokenizer(
    source: Location, folder: Path, model: ModelConfig, given: Path | None, eod: str | None, configured: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Complete the tokenizer files in `folder`, which has the companions of the checkpoint `source`. `given`, `eod`: a
    user's tokenizer.json and end-of-document token; `configured`: the run's `data.tokenizer`.

    Returns the keys that config.json gets beside the model's, and a line for each thing that is missing.
    Raises: DataError if a given tokenizer or token is unusable, CheckpointError for unreadable companions
    """
    keys, info = _read_object(source / SOURCE_CONFIG), data_tokenizer(source)
    file, missing = (given, list[str]()) if given else _find_tokenizer(folder, configured)
    if keys and not given and not eod:  # the files of foreign weights stand as they are
        return keys | _add_eos(keys, folder, info.eod if info else None), missing
    if file is None:
        return keys | (_ids(info) if info else {}), missing
    known = info.eod if info and info.fingerprint == fingerprint(file) else None
    try:
        tokenizer = _load(file, model.vocab_size if known is None else None, eod or known)
    except DataError as error:
        if given or eod:
            raise
        return keys, [f"no tokenizer included: {error.message}; give another with --tokenizer FILE"]
    if file.parent != folder:
        _copy_tokenizer(file, folder)
    if not exists(path := folder / "tokenizer_config.json"):
        made: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.seq_length}
        if tokenizer is not None:
            ids = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eod}
            made |= {key: tokenizer.token(id) for key, id in ids.items() if id is not None}
        write_text(path, json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    if tokenizer is None:
        what = f"no file says which token of {file.name} ends a text"
        return keys, [f"no eos_token_id included: {what}; give --eod TOKEN"]
    return _ids(tokenizer) | keys | _add_eos(keys, folder, tokenizer.eod), missing


def _ids(frame: TokenizerInfo | FileTokenizer) -> dict[str, int]:
    """The ids that begin and end a text. Without a beginning of its own a document begins after the end of another."""
    return {"bos_token_id": frame.eod if frame.bos is None else frame.bos, "eos_token_id": frame.eod}


def data_tokenizer(source: Location) -> TokenizerInfo | None:
    """The tokenizer of a checkpoint's training data, as `megascale data prepare` described it; None if unknown.

    Raises: CheckpointError for an unreadable description
    """
    keys = _read_object(source / DATA_TOKENIZER)
    try:
        return TokenizerInfo(**keys) if keys else None
    except TypeError as error:
        what = f"{source / DATA_TOKENIZER} cannot be read: {error}"
        raise CheckpointError(what, hint="remove it, and give --tokenizer and --eod") from None


def load_framed(source: Location, folder: Path, name: str | None, eod: str | None) -> FramedTokenizer:
    """Load the tokenizer of `source`, whose Hugging Face files are in `folder`, or the one of a `name` or file and with
    the token `eod`, if given. The training data's description says which ids begin and end a text; for foreign weights
    their files do.

    Raises: DataError, CheckpointError
    """
    info = data_tokenizer(source)
    stop = next(filter(None, (_id_list(_read_object(Location(str(folder / file)))) for file in ID_FILES)), [])
    given, name = name, name or _tokenizer_of(source, folder, info)
    has_file = name not in TOKENIZERS.cards
    identity = fingerprint(Path(name)) if has_file and is_file(name) else name
    same = info is not None and info.fingerprint == identity
    known: int | None = info.eod if info and same else (stop[0] if stop and not given else None)
    tokenizer = load_tokenizer(name, eod or (known if has_file else None))
    if given and not same:
        stop = []  # ids of another tokenizer
    framed = isinstance(tokenizer, FileTokenizer) and tokenizer.frames_with_bos
    bos = info.bos if info and same else (tokenizer.bos if framed else None)
    return FramedTokenizer(tokenizer, bos, list(dict.fromkeys([tokenizer.eod, *stop])))


def _tokenizer_of(source: Location, folder: Path, info: TokenizerInfo | None) -> str:
    """The tokenizer.json beside the weights, or the tokenizer of the training data or the run's configuration."""
    if is_file(folder / "tokenizer.json"):
        return str(folder / "tokenizer.json")
    if info and (info.name in TOKENIZERS.cards or is_file(info.name, optional=True)):
        return info.name
    tokenizer = None
    if (source / manifest.NAME).exists():
        tokenizer = (manifest.read(source).facts.config.get("data") or {}).get("tokenizer")
    if not tokenizer:
        raise CheckpointError(f"{source} does not name its tokenizer", hint="--tokenizer FILE")
    return str(tokenizer)


def _find_tokenizer(folder: Path, name: str | None) -> tuple[Path | None, list[str]]:
    """The tokenizer.json in `folder`, or `name`, that of the run's configuration; None, and why, if there is none."""
    if any(exists(folder / file) for file in TOKENIZER_FILES) or not name:
        placed = folder / "tokenizer.json"
        return (placed if is_file(placed) else None), []
    if name in TOKENIZERS.cards:
        return None, [f"no tokenizer included: {name!r} has no file; use megascale sample --tokenizer {name}"]
    if reason := why_unreadable(name):
        return None, [f"no tokenizer included: {reason} on this host; give --tokenizer FILE"]
    return Path(name), []


def _copy_tokenizer(file: Path, folder: Path) -> None:
    """Copy a tokenizer and the files beside it, in place of the tokenizer in `folder`."""
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
        if is_file(file.parent / name):
            shutil.copyfile(file.parent / name, folder / name)
    shutil.copyfile(file, folder / "tokenizer.json")


def _load(file: Path, most: int | None, eod: str | int | None) -> FileTokenizer | None:
    """Load a tokenizer; None if no file says which token ends a text. `most`: tokens of the model, unless its training
    data are of this tokenizer, and had no others.

    Raises: DataError if the file is no tokenizer, lacks a given token, or has more tokens than the model's vocabulary
    """
    unframed = FileTokenizer(file, eod=0)
    if most is not None and unframed.vocab_size > most:
        what = f"{file} has tokens up to {unframed.vocab_size - 1}, but model.vocab_size is {most}"
        raise DataError(what, hint="the tokenizer that the model was trained with")
    if eod is None and unframed.named_eod is None:
        return None
    return FileTokenizer(file, eod)


def _add_eos(keys: dict[str, Any], folder: Path, eod: int | None) -> dict[str, Any]:
    """The `eos_token_id` of config.json with `eod` among its ids; generation_config.json gets it too."""
    if eod is None:
        return {}
    path = folder / "generation_config.json"
    generation = _read_object(Location(str(path)))
    if "eos_token_id" in generation and eod not in _id_list(generation):
        write_text(path, json.dumps(generation | _with_id(generation, eod), indent=2) + "\n")
    return _with_id(keys, eod)


def _with_id(keys: dict[str, Any], eod: int) -> dict[str, Any]:
    ids = _id_list(keys)
    return {"eos_token_id": keys["eos_token_id"] if eod in ids else [*ids, eod] if ids else eod}


def _id_list(keys: dict[str, Any]) -> list[int]:
    ids = keys.get("eos_token_id")
    return [id for id in (ids if isinstance(ids, list) else [ids]) if isinstance(id, int)]


def _read_object(path: Location) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file.

    Raises: CheckpointError for a file that is unreadable, or no JSON object
    """
    try:
        value = json.loads(path.read()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint="another copy of the checkpoint") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", hint="another copy of the checkpoint")
    return value
