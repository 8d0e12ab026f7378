"""A token dataset, read by megatron-core and repeated for as many epochs as a run needs.

megatron-core shuffles all epochs of a run together, which makes the sample order depend on the length of the run. Here
every epoch is a separate megatron-core dataset with its own shuffle seed, and a run can be extended without changing
the order of its samples. Rank 0 writes the sample indices of an epoch shortly before its first use
(`EpochDataset.prepare_indices`). Few epochs are open at a time (`OpenEpochs`), because a small dataset may repeat
thousands of times, and a blend may have thousands of datasets.

EpochDataset: the samples. build_cached: construct a megatron-core dataset, with its indices written by rank 0.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megascale.config.dataset_files import SplitName, document_range
from megascale.config.run import RunConfig, dataset_prefixes
from megascale.core.errors import DataError
from megascale.core.limits import os_error_hint
from megascale.data import indexed_dataset
from megascale.data.index_files import load_indices
from megascale.data.open_epochs import OpenEpochs
from megascale.parallel.rng import seed_of

MEMORY_HINT = "fewer train.steps or a smaller batch.global (a blend has 10 bytes for each sample), or more memory"

NO_PADDING = -(2**63)
"""Id of padding, which samples of whole sequences do not have. By default -1: tokens -1 would count as padding."""


class EpochDataset:
    """The samples of a dataset, epoch after epoch, every epoch shuffled with its own seed.

    `document_fraction`: the range [start, stop) of the dataset's documents to read, as fractions of their number.
    `open_epochs`: the open epochs of all datasets of the split.
    `index_split`, `config` and `unique_identifiers` are the interface that megatron-core's BlendedDataset reads.
    """

    def __init__(
        self,
        config: RunConfig,
        split: SplitName,
        prefix: Path,
        document_fraction: tuple[float, float],
        open_epochs: OpenEpochs,
    ) -> None:
        reader = indexed_dataset.open_dataset(prefix)
        first, last = document_range(len(reader), document_fraction)
        tokens = int(reader.lengths[first:last].sum(dtype=np.int64))
        if tokens <= config.model.seq_length:
            raise DataError(
                f"{prefix}: {tokens} tokens to {'train' if split == 'train' else 'validate'} on, "
                f"fewer than one sample of {config.model.seq_length} + 1",
                hint="more data, another data.split, or a shorter model.seq_length",
            )
        stat = prefix.with_name(prefix.name + ".idx").stat()
        identity = {"bytes": stat.st_size, "changed": stat.st_mtime_ns, "documents": [first, last]}
        self._tokenizer = _Tokenizer(reader.info.tokenizer.eod if reader.info else 0, identity)
        self._config = config
        self._prefix = prefix
        self.index_split = megatron_datasets("utils").Split[split]
        self._documents = np.arange(first, last, dtype=np.int32)
        self.config = self._settings(0)
        self._open_epochs = open_epochs
        self.samples_per_epoch = len(self._epoch(0))
        self._prepared_epochs = 1  # rank 0 writes no indices of earlier epochs
        self.unique_identifiers = {"prefix": str(prefix), "seed": config.train.seed, **identity}

    def __len__(self) -> int:
        """Return a number beyond any need: samples never end, and a blend checks that enough exist."""
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        epoch, within = divmod(int(index), self.samples_per_epoch)
        opened = self._epoch(epoch)
        try:
            sample: dict[str, torch.Tensor] = opened[within]
        except (IndexError, ValueError) as error:
            raise self._changed(index, str(error)) from None
        if not bool(sample["loss_mask"].all()):  # megatron-core pads samples of documents that are too short
            raise self._changed(index, "its documents are too short")
        return sample

    def _changed(self, index: int, what: str) -> DataError:
        hint = "files of a dataset, and of data.cache, must stay as they are while a run reads them"
        return DataError(f"sample {index} of {self._prefix} is not as its index says: {what}", hint=hint)

    def prepare_indices(self, start: int, stop: int) -> None:
        """Write the missing indices of samples [start, stop) on rank 0; do nothing on other ranks."""
        if _rank() == 0:
            for epoch in range(
                max(start // self.samples_per_epoch, self._prepared_epochs), -(-stop // self.samples_per_epoch)
            ):
                self._epoch(epoch)
                self._prepared_epochs = epoch + 1

    def _epoch(self, epoch: int) -> Any:
        return self._open_epochs.get((self._prefix, epoch), lambda: self._open_epoch(epoch))

    def _open_epoch(self, epoch: int) -> Any:
        kind = megatron_datasets("gpt_dataset").GPTDataset
        try:
            tokens = kind.build_low_level_dataset(str(self._prefix), self.config)
        except OSError as error:
            hint = os_error_hint(error, "the files of a dataset must stay in place while a run reads them")
            raise DataError(f"{self._prefix} cannot be read: {error.strerror or error}", hint=hint) from None
        arguments = (tokens, str(self._prefix), self._documents, None, self.index_split)
        return build_cached(kind, *arguments, config=self._settings(epoch))

    def _settings(self, epoch: int) -> Any:
        return megatron_datasets("gpt_dataset").GPTDatasetConfig(
            random_seed=seed_of(self._config.train.seed, "epoch", epoch) % 2**32,  # numpy's seeds are u32
            sequence_length=self._config.model.seq_length,
            blend=([str(self._prefix)], None),
            split="1,0,0",
            path_to_cache=str(_cache_folder(self._config)),
            tokenizer=self._tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )


@dataclass(frozen=True)
class _Tokenizer:
    """The part of a tokenizer that megatron-core's datasets read. `unique_identifiers` enters the names of cached
    indices, which tells apart the indices of different documents under the same prefix.
    """

    eod: int
    unique_identifiers: Mapping[str, Any]
    vocab_size: int | None = None
    pad: int = NO_PADDING


def megatron_datasets(module: str) -> Any:
    """Import a module of `megatron.core.datasets`. The import takes seconds, loads torch extensions and warns about
    missing ones: it waits until data is first read, and the warnings are silenced.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.datasets.{module}")


def build_cached(dataset_class: Any, *arguments: Any, config: Any) -> Any:
    """Construct `dataset_class(*arguments, config)` of megatron-core, with its indices in `config.path_to_cache`.

    Rank 0 must call this first, and writes the indices. Files are written in a temporary folder and renamed: neither a
    concurrent job that shares the cache nor a job after a kill finds half a file.

    Raises: DataError if the cache cannot be written, is damaged, or lacks a file of rank 0.
    """
    folder, rank = Path(config.path_to_cache), _rank()
    try:
        if rank == 0:
            _write_indices(folder, dataset_class, arguments, config)
        dataset = dataset_class(*arguments, replace(config, defer_npy_index_mmap=True))  # it would load pickles
        load_indices(dataset, check_ranges=rank == 0)
        dataset.config = config
        return dataset
    except FileNotFoundError as error:
        seen = ", but rank 0 wrote it" if rank else ": it was removed after it was written"
        hint = "data.cache = a folder that all hosts share" if rank else "data.cache = a folder that nothing cleans"
        raise DataError(f"{error.filename} is not there for rank {rank}{seen}", hint=hint) from None
    except OSError as error:
        what = f"sample indices cannot be kept in {folder}: {error.strerror or error}"
        raise DataError(what, hint=os_error_hint(error, "data.cache = another folder")) from None
    except MemoryError as error:
        raise DataError(f"sample indices do not fit in memory: {error}", hint=MEMORY_HINT) from None
    except (ValueError, EOFError) as error:
        raise DataError(f"sample indices in {folder} are damaged: {error}", hint="remove that folder") from None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _write_indices(folder: Path, dataset_class: Any, arguments: tuple[Any, ...], config: Any) -> None:
    """Write a dataset's indices unless they exist. The description file is renamed last and marks them complete."""
    unread = dataset_class(*arguments, replace(config, defer_npy_index_mmap=True))  # has its hash, opens no index
    split = getattr(unread, "split", None) or unread.index_split
    description = f"{unread.unique_description_hash}-{dataset_class.__name__}-{split.name}-description.txt"
    if (folder / description).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as temporary:
        dataset_class(*arguments, replace(config, path_to_cache=temporary))
        for path in sorted(Path(temporary).iterdir(), key=lambda path: path.name == description):
            path.replace(folder / path.name)


def _cache_folder(config: RunConfig) -> Path:
    """The folder of megatron-core's cached indices."""
    if config.data.cache:
        return Path(config.data.cache)
    return Path(dataset_prefixes(config.data.train)[0]).parent / "cache"
