"""The specification of a split's samples: sections and values of a run's configuration. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.config.data import DataConfig, WeightChange
from megascale.config.dataset_files import SplitName, split_source
from megascale.config.decomposition import Decomposition, decomposition, is_decomposed
from megascale.config.run import RunConfig, dataset_prefixes
from megascale.operate.node.host_limits import datasets_by_split, max_open_epochs


@dataclass(frozen=True)
class MixtureSpec:
    """The samples of a split: `seq_length` tokens and a label each. `seed`: of all shuffles. `decomposition`: of the
    documents of this split. `open_epochs`: most epochs that may be open at a time.
    """

    split: SplitName
    data: DataConfig
    seq_length: int
    vocab_size: int
    seed: int
    decomposition: Decomposition | None
    open_epochs: int

    @property
    def is_train(self) -> bool:
        return self.split == "train"

    @property
    def prefixes(self) -> list[str]:
        """The prefixes of the datasets; none for mock data."""
        return dataset_prefixes(split_source(self.data, self.split)[0])

    @property
    def weights(self) -> list[float]:
        """The weight of each dataset in the blend, from the start on."""
        source, _ = split_source(self.data, self.split)
        return [1.0] if source is None or isinstance(source, str) else [weight for weight, _ in source]

    @property
    def weight_changes(self) -> Sequence[WeightChange]:
        """The weights from a place in the order of samples on."""
        return self.data.weights if self.is_train else []

    @property
    def fractions(self) -> tuple[float, float]:
        """The range [start, stop) of the documents of each dataset to read, as fractions of their number."""
        return split_source(self.data, self.split)[1]

    @property
    def index_folder(self) -> Path:
        """The folder of the sample indices: `data.cache`, or the folder cache beside the first dataset of train."""
        data = self.data
        return Path(data.cache) if data.cache else Path(dataset_prefixes(data.train)[0]).parent / "cache"


def mixture_spec(config: RunConfig, split: SplitName) -> MixtureSpec:
    """Return the specification of the samples of a run's split. `config`: resolved."""
    sections = config.model, config.batch, config.data
    pieces = decomposition(*sections) if is_decomposed(config.data, split) else None
    datasets = len(dataset_prefixes(split_source(config.data, split)[0]))
    buckets = len(pieces.pieces) if pieces else 1
    splits = datasets_by_split(config.data, config.train.eval_every)
    open_epochs = max_open_epochs(splits, config.world_size, datasets * buckets) if datasets else 0
    sizes = config.model.seq_length, config.model.vocab_size
    return MixtureSpec(split, config.data, *sizes, config.train.seed, pieces, open_epochs)
