"""One token dataset, read by megatron-core, repeated as often as needed.

megatron-core shuffles all epochs of a run together, so that the order changes with the length of the run. Here every
epoch is a dataset of its own, shuffled with its own seed: a run that is prolonged goes on where it was. Its indices are
written by rank 0 shortly before they are needed (`prepare`), and a few epochs are open at a time: a small dataset may
be repeated thousands of times.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megascale.config.run import RunConfig, prefixes
from megascale.core.errors import DataError
from megascale.data import indexed
from megascale.parallel.rng import seed_of

SplitName = Literal["train", "valid"]

OPEN = 2
"""Epochs of a dataset that are kept open: a step that crosses the end of one reads two."""


class Epochs:
    """The samples of one dataset, epoch after epoch, each in an order of its own. `documents`: which fraction of the
    dataset's documents they come from.

    It stands in for a dataset of megatron-core in a blend, hence `index_split`, `config` and `unique_identifiers`.
    """

    def __init__(self, config: RunConfig, split: SplitName, prefix: Path, documents: tuple[float, float]) -> None:
        reader = indexed.read(prefix)
        first, last = (round(len(reader) * edge) for edge in documents)
        tokens = int(reader.lengths[first:last].sum(dtype=np.int64))
        if tokens <= config.model.seq_length:
            raise DataError(
                f"{prefix}: {tokens} tokens to {'train' if split == 'train' else 'validate'} on, "
                f"fewer than one sample of {config.model.seq_length} + 1",
                mend="more data, another data.split, or a shorter model.seq_length",
            )
        stat = prefix.with_name(prefix.name + ".idx").stat()
        identity = {"bytes": stat.st_size, "changed": stat.st_mtime_ns, "documents": [first, last]}
        self._tokenizer = _Tokenizer(reader.made.tokenizer.eod if reader.made else 0, identity)
        self._run = config
        self._prefix = prefix
        self.index_split = megatron("utils").Split[split]
        self._documents = np.arange(first, last, dtype=np.int32)
        self.config = self._settings(0)
        self._low_level = megatron("gpt_dataset").GPTDataset.build_low_level_dataset(str(prefix), self.config)
        self._open: dict[int, Any] = {}
        self.per_epoch = len(self._epoch(0))
        self._prepared = 1  # epochs from the first, or from where a resumed run began
        self.unique_identifiers = {"prefix": str(prefix), "seed": config.train.seed, **identity}

    def __len__(self) -> int:
        """There is no end of samples; a blend asks whether there are enough."""
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        epoch, within = divmod(int(index), self.per_epoch)
        return self._epoch(epoch)[within]

    def prepare(self, start: int, stop: int) -> None:
        """On rank 0, write the indices of samples [start, stop), where they are not there; elsewhere nothing."""
        if _rank() == 0:
            for epoch in range(max(start // self.per_epoch, self._prepared), -(-stop // self.per_epoch)):
                self._epoch(epoch)
                self._prepared = epoch + 1

    def _epoch(self, epoch: int) -> Any:
        if epoch not in self._open:
            kind = megatron("gpt_dataset").GPTDataset
            arguments = (self._low_level, str(self._prefix), self._documents, None, self.index_split)
            self._open[epoch] = cached(kind, *arguments, config=self._settings(epoch))
            if len(self._open) > OPEN:
                del self._open[next(iter(self._open))]  # samples are read in order: the oldest is done with
        return self._open[epoch]

    def _settings(self, epoch: int) -> Any:
        return megatron("gpt_dataset").GPTDatasetConfig(
            random_seed=seed_of(self._run.train.seed, "epoch", epoch) % 2**32,  # what numpy takes
            sequence_length=self._run.model.seq_length,
            blend=([str(self._prefix)], None),
            split="1,0,0",
            path_to_cache=str(_cache(self._run)),
            tokenizer=self._tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )


@dataclass(frozen=True)
class _Tokenizer:
    """What megatron-core's datasets ask of a tokenizer. `unique_identifiers` enters the names of cached indices: with
    it they are not mistaken for those of other documents under the same prefix.
    """

    eod: int
    unique_identifiers: Mapping[str, Any]
    vocab_size: int | None = None


def megatron(module: str) -> Any:
    """A module of megatron-core's datasets: imported when data is first read, since it takes seconds and brings torch
    extensions with it, and without its warnings about those that this machine lacks.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.datasets.{module}")


def cached(kind: Any, *arguments: Any, config: Any) -> Any:
    """A dataset `kind(*arguments, config)` of megatron-core, with its indices in `config.path_to_cache`.

    Rank 0 comes first and writes them. It writes elsewhere and renames: neither another job that shares the cache, nor
    the next one after a kill, finds half a file.

    Raises: DataError if the cache cannot be written, or does not hold what rank 0 wrote.
    """
    folder, rank = Path(config.path_to_cache), _rank()
    try:
        if rank == 0:
            _fill(folder, kind, arguments, config)
        return kind(*arguments, config)
    except FileNotFoundError as error:
        what = f"{error.filename} is not there for rank {rank}, but rank 0 wrote it"
        raise DataError(what, mend="data.cache = a folder that all hosts share") from None
    except OSError as error:
        what = f"sample indices cannot be kept in {folder}: {error.strerror or error}"
        raise DataError(what, mend="data.cache = a folder that can be written, with room") from None
    except (ValueError, EOFError) as error:
        raise DataError(f"sample indices in {folder} are damaged: {error}", mend="remove that folder") from None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _fill(folder: Path, kind: Any, arguments: tuple[Any, ...], config: Any) -> None:
    """Write a dataset's indices, if they are not there."""
    unread = kind(*arguments, replace(config, defer_npy_index_mmap=True))  # knows its name, and opens nothing
    split = getattr(unread, "split", None) or unread.index_split
    last = f"{unread.unique_description_hash}-{kind.__name__}-{split.name}-description.txt"
    if (folder / last).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as unfinished:
        kind(*arguments, replace(config, path_to_cache=unfinished))
        for path in sorted(Path(unfinished).iterdir(), key=lambda path: path.name == last):
            path.replace(folder / path.name)


def _cache(config: RunConfig) -> Path:
    """Where megatron-core keeps its indices."""
    if config.data.cache:
        return Path(config.data.cache)
    return Path(prefixes(config.data.train)[0]).parent / "cache"
