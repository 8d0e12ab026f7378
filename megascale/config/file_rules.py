"""Rules for files on disk and in remote storage: datasets, tokenizers, checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec

from megascale.catalog.data import TOKENIZERS
from megascale.config.data import Blend, DataConfig, SplitName, dataset_prefixes
from megascale.config.dataset_files import (
    NO_LABELS_HINT,
    DatasetFiles,
    document_range,
    other_tokens_hint,
    read_all_dataset_files,
    split_source,
    without_labels,
)
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.train import HF_PREFIX, BatchConfig, CheckpointConfig, ObserveConfig, TrainConfig
from megascale.core.errors import DataError
from megascale.core.files import NO_FILE, absolute_path, fingerprint, is_folder, why_unreadable
from megascale.core.limits import PERMISSIONS_HINT
from megascale.core.readable import is_url


def data_source(data: DataConfig, train: TrainConfig) -> Iterator[Finding]:
    """Check that training data are given, and validation data if evaluations are on."""
    if data.mock and (data.train or data.valid):
        hint = "remove data.mock or data.train and data.valid"
        yield Finding("data.mock", "both mock data and datasets are given", hint)
    if not data.mock and data.train is None:
        hint = 'data.train = "prefix" (see `megascale data prepare`), or data.mock = true'
        yield Finding("data.train", "no training data", hint)
    if train.eval_every and not data.mock and data.valid is None and data.split[1] == 0:
        message = "evaluation needs validation data, but its share is 0"
        yield Finding("data.split", message, "data.valid, or a second share above 0")
    if data.split[0] == 0:
        yield Finding("data.split", "the share of training documents is 0", "for example [0.99, 0.01]")


@dataclass(frozen=True)
class PreparedDataset:
    """The description file of a dataset by `megascale data prepare`: vocabulary size of the tokenizer, highest token
    in the dataset (-1 if unknown), tokenizer, and `frame`, how its documents begin and end.
    """

    prefix: str
    vocab_size: int
    highest_token: int
    tokenizer: str
    fingerprint: str
    frame: str

    @classmethod
    def of(cls, files: DatasetFiles) -> PreparedDataset:
        facts, tokenizer = files.description, files.description["tokenizer"]
        bos, eod = tokenizer.get("bos"), tokenizer.get("eod")
        frame = f"end with token {eod}" if bos is None else f"begin with token {bos} and end with token {eod}"
        sizes = facts["vocab_size"], facts["highest_token"]
        return cls(files.prefix, *sizes, tokenizer["name"], tokenizer["fingerprint"], frame)


def data_files(model: ModelConfig, data: DataConfig) -> Iterator[Finding]:
    """Check that datasets exist, are whole, share one tokenizer, fit the run's vocabulary, and are named once."""
    first: PreparedDataset | None = None
    if unusable := list(_remote_datasets(data)):
        yield from unusable
        return
    for key, source in (("data.train", data.train), ("data.valid", data.valid)):
        yield from _repeated(key, source)
        prefixes = dict.fromkeys(dataset_prefixes(source))
        absent = {prefix: reasons for prefix in prefixes if (reasons := _why_unreadable(prefix))}
        found = read_all_dataset_files([prefix for prefix in prefixes if prefix not in absent])
        for prefix in prefixes:
            if prefix in absent:
                yield _missing_files(key, prefix, absent[prefix])
            elif isinstance(files := found[prefix], DataError):
                yield Finding(key, files.message, files.hint)
            elif files.description:
                prepared = PreparedDataset.of(files)
                first = first or prepared
                yield from _mismatches(key, prepared, first, data.tokenizer, model.vocab_size)
    if data.tokenizer and data.tokenizer not in TOKENIZERS.cards and (reason := why_unreadable(data.tokenizer)):
        file = absolute_path(data.tokenizer) / "tokenizer.json"
        hint = "remove the key, or give the tokenizer of the data" if why_unreadable(file) else f"did you mean {file}?"
        yield Finding("data.tokenizer", reason, hint)
    if data.document_order_file and not data.mock and (reason := why_unreadable(data.document_order_file)):
        yield Finding("data.document_order_file", reason, "check the path, or remove the key")


def data_samples(model: ModelConfig, batch: BatchConfig, train: TrainConfig, data: DataConfig) -> Iterator[Finding]:
    """Check that every dataset has a sample to train on, and that validation data fill a global batch."""
    if sum(data.split) == 0 or list(_remote_datasets(data)):
        return  # `data_source` and `data_files` report them: no storage is asked in vain
    splits: tuple[SplitName, ...] = ("train", "valid") if train.eval_every else ("train",)
    for split in splits:
        yield from _too_few(split, data, model.seq_length, batch.total)


def _too_few(split: SplitName, data: DataConfig, length: int, batch: int) -> Iterator[Finding]:
    """Compare the tokens of a split with a sample, its documents with the shortest with a label, and the samples of
    validation data with a global batch.
    """
    source, fractions = split_source(data, split)
    if fractions[0] == fractions[1]:
        return
    key = f"data.{split}" if split == "train" or data.valid is not None else "data.split"
    weights = [1.0] if source is None or isinstance(source, str) else [weight for weight, _ in source]
    samples = []
    found = read_all_dataset_files(dataset_prefixes(source))
    for weight, prefix in zip(weights, dataset_prefixes(source), strict=False):
        files = found[prefix]
        try:
            if isinstance(files, DataError):
                raise files
            documents = document_range(files.documents, fractions)
            tokens, unlabelled = files.tokens_in(*documents), without_labels(data, files, *documents)
        except DataError:
            return  # `data_files` reports it
        if tokens <= length:
            verb = "train" if split == "train" else "validate"
            message = f"{prefix}: {tokens} tokens to {verb} on, fewer than one sample of {length} + 1"
            hint = "more data, another data.split, or a shorter model.seq_length"
            if files.documents == 1:
                hint = "data.valid, or more documents: the split is by documents, and the dataset has one"
            yield Finding(key, message, hint)
            return
        if unlabelled:
            yield Finding(key, unlabelled, NO_LABELS_HINT)
            return
        samples.append(int((tokens - 1) // length / (weight / sum(weights))))
    if split == "valid" and samples and min(samples) < batch:
        message = f"{min(samples)} samples to validate on are fewer than one global batch of {batch}"
        yield Finding(key, message, "more data, another data.split, or a smaller batch.global")


def _remote_datasets(data: DataConfig) -> Iterator[Finding]:
    """Check that the file systems of remote datasets are installed, and that data.cache is a folder of this host."""
    for key, source in (("data.train", data.train), ("data.valid", data.valid)):
        for protocol in dict.fromkeys(p.partition("://")[0] for p in dataset_prefixes(source) if is_url(p)):
            yield from _not_installed(key, protocol)
            if data.cache is None:
                message = "datasets in remote storage need a folder for their indices and blocks"
                yield Finding("data.cache", message, "a folder on a disk of each host, or that hosts share")
    if data.cache is not None and is_url(data.cache):
        yield Finding("data.cache", f"{data.cache} is a URL", "a folder on a disk of each host, or that hosts share")


def _not_installed(key: str, protocol: str) -> Iterator[Finding]:
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        yield Finding(key, f"{protocol}: {error}", "install the package that fsspec names, or give a path")


def _why_unreadable(prefix: str) -> list[str]:
    if is_url(prefix):
        return []  # reading them tells
    return [reason for end in (".bin", ".idx") if (reason := why_unreadable(prefix + end))]


def _missing_files(key: str, prefix: str, reasons: list[str]) -> Finding:
    """Tell files that are absent from files that this user may not read."""
    if any(not reason.startswith(NO_FILE) for reason in reasons):
        hint = PERMISSIONS_HINT if "cannot be read" in reasons[-1] else "all files of a prepared dataset"
        return Finding(key, " and ".join(reasons), hint)
    if not why_unreadable(prefix):
        return _not_a_prefix(key, prefix)
    hint = "`megascale data prepare` creates datasets"
    if texts := [prefix + end for end in TEXT_ENDS if not why_unreadable(prefix + end)]:
        hint = _prepare(texts[0])
    elif is_folder(prefix, optional=True):
        names = sorted(path.stem for path in Path(prefix).glob("*.idx"))
        hint = f"a dataset of this folder: {', '.join(names[:5])}" if names else _prepare(f"{prefix}/*.jsonl")
    return Finding(key, NO_FILE + " nor ".join(reason.removeprefix(NO_FILE) for reason in reasons), hint)


TEXT_ENDS = (".jsonl", ".json", ".txt", ".jsonl.gz", ".jsonl.zst", ".parquet")


def _not_a_prefix(key: str, path: str) -> Finding:
    """Report a file in the place of a dataset's prefix: a part of a dataset, or text that is not prepared."""
    part = next((end for end in (".bin", ".idx") if path.endswith(end)), "")
    if part:
        return Finding(key, f"{path} is a file of a dataset", f"its prefix, the path without {part}")
    return Finding(key, f"{path} is a file, and no prefix of a dataset's .bin and .idx", _prepare(path))


def _prepare(path: str) -> str:
    name = path.partition("*")[0].rstrip("/").rpartition("/")[2].partition(".")[0]
    prefix = f"data/{name or 'train'}"
    return f"text needs `megascale data prepare {path} --output {prefix} --tokenizer FILE`; then write {prefix}"


def _repeated(key: str, source: str | Blend | None) -> Iterator[Finding]:
    """Find datasets that a blend names twice, whose samples would come twice in the same order."""
    places = [os.path.realpath(prefix) for prefix in dataset_prefixes(source)]
    for prefix, place in dict(zip(dataset_prefixes(source), places, strict=True)).items():
        if (count := places.count(place)) > 1 and isinstance(source, list):
            weight = sum(weight for (weight, _), other in zip(source, places, strict=True) if other == place)
            yield Finding(key, f"{prefix} is named {count} times", f"once, with the weight {weight:g}")
            return


def _mismatches(
    key: str, prepared: PreparedDataset, first: PreparedDataset, tokenizer: str | None, vocab_size: int
) -> Iterator[Finding]:
    """Compare a dataset with the run's vocabulary and tokenizer, and with the first dataset."""
    if prepared.highest_token >= vocab_size:
        message = f"{vocab_size} is too few for token {prepared.highest_token} of {prepared.prefix}"
        yield Finding("model.vocab_size", message, other_tokens_hint(prepared.highest_token + 1))
    elif prepared.highest_token < 0 and prepared.vocab_size > vocab_size:
        message = f"{vocab_size} is less than the {prepared.vocab_size} tokens of the tokenizer of {prepared.prefix}"
        hint = f"prepare it again, which notes the tokens it has; {other_tokens_hint(prepared.vocab_size)}"
        yield Finding("model.vocab_size", message, hint)
    if tokenizer and _fingerprint(tokenizer) not in (None, prepared.fingerprint):
        message = f"{tokenizer} is not the tokenizer of {prepared.prefix} ({prepared.tokenizer})"
        yield Finding("data.tokenizer", message, "give the dataset's tokenizer, or prepare the data again")
    elif prepared.fingerprint != first.fingerprint:
        message = f"{first.prefix} and {prepared.prefix} have different tokenizers"
        yield Finding(key, message, "prepare one dataset again")
    elif prepared.frame != first.frame:
        message = f"documents of {first.prefix} {first.frame}, those of {prepared.prefix} {prepared.frame}"
        yield Finding(key, message, "prepare one dataset again, with the same --eod and --add-bos")


def _fingerprint(tokenizer: str) -> str | None:
    """Return a tokenizer's name in dataset descriptions; None for a missing file, which `data_files` reports."""
    if tokenizer in TOKENIZERS.cards:
        return tokenizer
    return None if why_unreadable(tokenizer) else fingerprint(Path(tokenizer))


def resume(checkpoint: CheckpointConfig) -> Iterator[Finding]:
    """Check that a given checkpoint or folder of Hugging Face weights exists."""
    value = checkpoint.resume
    if value.startswith(HF_PREFIX):
        folder = value.removeprefix(HF_PREFIX)
        if reason := why_unreadable(absolute_path(folder) / "config.json"):
            yield Finding("checkpoint.resume", reason, "the path of a folder of Hugging Face weights on this host")
    elif "://" not in value and value not in ("auto", "never") and not _is_checkpoint(Path(value)):
        hint = f"auto, never, a folder with a manifest.json, a run's folder, or {HF_PREFIX}FOLDER"
        if not why_unreadable(absolute_path(value) / "config.json"):
            hint = f"did you mean {HF_PREFIX}{value}?"
        yield Finding("checkpoint.resume", f"there is no checkpoint in {value or repr(value)}", hint)


def _is_checkpoint(folder: Path) -> bool:
    """Return True for the folder of a checkpoint or of a run with checkpoints."""
    if not why_unreadable(folder / "manifest.json"):
        return True
    try:
        return any(folder.glob("step-*/manifest.json")) or any(folder.glob("checkpoints/step-*/manifest.json"))
    except (OSError, ValueError):
        return False


def memory_folder(checkpoint: CheckpointConfig) -> Iterator[Finding]:
    """Check that the folder of copies in memory can be written."""
    folder = checkpoint.in_memory_dir
    if checkpoint.in_memory_every and not (Path(folder).is_absolute() and os.access(folder, os.W_OK | os.X_OK)):
        message = f"{folder!r} is not the absolute path of a writable folder"
        yield Finding("checkpoint.in_memory_dir", message, "/dev/shm, or another folder on a memory file system")


def file_system(checkpoint: CheckpointConfig, observe: ObserveConfig) -> Iterator[Finding]:
    """Check that a URL is complete, and that its file system is installed and visible to all processes."""
    places = [("checkpoint.dir", checkpoint.dir), ("observe.store_dir", observe.store_dir)]
    if not checkpoint.resume.startswith(HF_PREFIX):  # else a path
        places.append(("checkpoint.resume", checkpoint.resume))
    for key, text in places:
        protocol, separator, place = (text or "").partition("://")
        if separator and "::" in protocol:
            message = f"{text} is a chain of file systems, which ranks do not share"
            yield Finding(key, message, "the last URL of the chain")
        elif separator and place and protocol != "memory":
            yield from _not_installed(key, protocol)
        elif separator and place:
            memory = ", or checkpoint.in_memory_every for copies in memory" if key.startswith("checkpoint") else ""
            yield Finding(key, f"{text} is visible to one process only", f"a path{memory}")
        elif separator or (key.endswith("dir") and (text == "" or re.match(r"[a-z0-9]+:/", text or ""))):
            yield Finding(key, f"{text!r} is neither a path nor a URL", "such as /data/runs or s3://bucket/runs")
