"""The samples of a run's splits, as its configuration describes them (`mixture_spec`). No torch."""

from __future__ import annotations

from megascale.config.data import dataset_prefixes
from megascale.config.dataset_files import SplitName, split_source
from megascale.config.decomposition import decomposition, is_decomposed
from megascale.config.run import RunConfig
from megascale.data.mix.mixture_spec import MixtureSpec
from megascale.operate.node.host_limits import datasets_by_split, max_open_epochs


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
