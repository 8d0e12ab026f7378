"""The specification of a split's samples: sections and values of a run's configuration. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megascale.config.data import DataConfig, dataset_prefixes
from megascale.config.dataset_files import SplitName, split_source
from megascale.config.decomposition import Decomposition


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
    def fractions(self) -> tuple[float, float]:
        """The range [start, stop) of the documents of each dataset to read, as fractions of their number."""
        return split_source(self.data, self.split)[1]

    @property
    def index_folder(self) -> Path:
        """The folder of the sample indices: `data.cache`, or the folder cache beside the first dataset of train."""
        data = self.data
        return Path(data.cache) if data.cache else Path(dataset_prefixes(data.train)[0]).parent / "cache"
