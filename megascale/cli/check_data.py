"""The training data of a configuration: tokens, epochs and what packing loses in words, and memory of their reader."""

from __future__ import annotations

from megascale.config.dataset_files import count_tokens
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.core.units import format_count
from megascale.data.mix.batch_shape import BatchShape
from megascale.layout.chunks import token_ranks
from megascale.layout.topology import topology_of
from megascale.train.run_splits import mixture_spec

RANKS_OF_HOST = 8  # most ranks of a host here, which share a reader of the data: a larger job usually has several hosts


def data_summary(config: RunConfig) -> str:
    """Describe the training data, with the largest number of epochs over a dataset, and by the lengths of the documents
    what packing pads or leaves out; empty for mock data.
    """
    blend = list(count_tokens(config.data, "train"))
    if not blend:
        return ""
    packing, buckets = config.data.packing, list[int]()
    mixture = None
    if packing in ("decompose", "best_fit"):
        from megascale.data.mix.mixture import Mixture  # imports numpy

        mixture = Mixture(mixture_spec(config, "train"))
    if mixture and packing == "decompose":  # which leaves tokens out
        buckets = [sum(samples) for samples in mixture.bucket_samples()]
    total, epochs = 0, 0.0
    for number, (share, _, tokens) in enumerate(blend):
        if isinstance(tokens, DataError):
            raise tokens
        epoch = buckets[number] if buckets else (tokens - 1) // config.model.seq_length
        total, epochs = total + tokens, max(epochs, config.samples * share / epoch)
    count, most = (f"{len(blend)} datasets", " at most") if len(blend) > 1 else ("a dataset", "")
    text = f"trains on {format_count(total)} tokens of {count}, {epochs:.3g} epochs{most}"
    if mixture and packing == "best_fit":
        padding, left_out = mixture.best_fit_losses()
        text += f"; {padding:.2%} of the tokens are padding" if padding else ""
        text += f"; {left_out} rests of one token, which have no label, are left out" if left_out else ""
    if packing == "decompose":
        from megascale.data.mix.bucket_summary import describe_buckets  # imports numpy

        text += f"\n{describe_buckets(mixture_spec(config, 'train'))}"
    return f"{text}\n"


def reader_bytes(config: RunConfig) -> int:
    """Memory of the reader of the job's first host, on which are up to RANKS_OF_HOST ranks; 0 without one."""
    if config.data.reader != "host":
        return 0
    from megascale.data.host_reader.reader_memory import reader_shape  # imports numpy

    ranks = range(min(config.world_size, RANKS_OF_HOST))
    shape = BatchShape(config.batch.total, config.batch.micro, config.dp)
    splits = 2 if config.train.eval_every else 1
    ranks_of = topology_of(config.parallel), token_ranks(config.model, config.parallel), ranks
    return reader_shape(mixture_spec(config, "train"), shape, *ranks_of, splits).bytes
