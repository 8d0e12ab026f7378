"""Rules of `[data]`: packing and masks, order and weights of documents, skipped samples, and chunks."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.catalog.data import DATA_POLICIES
from megascale.config.data import DataConfig
from megascale.config.decomposition import Decomposition, decompose_min_length, decomposition
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.train import BatchConfig


def skipped_samples(data: DataConfig) -> Iterator[Finding]:
    """Check that the ranges of data.skip_samples ascend and do not overlap."""
    end = 0
    for start, stop in data.skip_samples:
        if start < end or stop <= start:
            message = f"[{start}, {stop}] is empty, or begins before the end of the range before it"
            hint = "ranges [start, stop] in ascending order, such as [[1000, 2000]]"
            yield Finding("data.skip_samples", message, hint)
            return
        end = stop


def changed_weights(data: DataConfig) -> Iterator[Finding]:
    """Check that data.blend_schedule is for the datasets of data.train, and that its places ascend."""
    count = len(data.train) if isinstance(data.train, list) else 1
    end, hint = -1, "[[place, [a weight for each dataset of data.train]], ...], with ascending places"
    for place, weights in data.blend_schedule:
        if len(weights) != count or not sum(weights):
            datasets = f"data.train has {count} dataset{'s' * (count > 1)}; not all weights may be 0"
            yield Finding("data.blend_schedule", f"{weights} at {place}: {datasets}", hint)
        if place <= end:
            yield Finding("data.blend_schedule", f"place {place} does not come after {end}", hint)
        end = place


def document_order(data: DataConfig) -> Iterator[Finding]:
    """Check that a file of the order of documents has one dataset, which is concatenated."""
    if data.document_order_file is None:
        return
    if data.mock:
        message, hint = "has no effect on mock data", "remove the key"
    elif isinstance(data.train, list):
        message, hint = "is the order of one dataset, and data.train is a blend", "a single dataset"
    elif data.packing != "concat":
        message, hint = f"has no effect with packing = {data.packing}", "packing = concat, or remove the key"
    else:
        return
    yield Finding("data.document_order_file", message, hint)


def end_of_document(model: ModelConfig, data: DataConfig) -> Iterator[Finding]:
    """Check that the end-of-document token is in the vocabulary."""
    if data.eod is not None and data.eod >= model.vocab_size:
        message = f"{data.eod} is no token of a vocabulary of {model.vocab_size}"
        yield Finding("data.eod", message, "the id of the end-of-document token")


def padded_experts(model: ModelConfig, data: DataConfig) -> Iterator[Finding]:
    """Check that all stages are told which tokens are padding, which no router may count."""
    if model.experts and data.packing == "best_fit" and data.attention_mask != "document":
        message = "best_fit fills samples with padding, and experts know it by the documents of a sample alone"
        yield Finding("data.packing", message, "data.attention_mask = document, or packing = concat")


def decomposed_documents(model: ModelConfig, batch: BatchConfig, data: DataConfig) -> Iterator[Finding]:
    """Check that the lengths of pieces are powers of two, and that pieces do not attend to each other."""
    if data.packing != "decompose":
        return
    length, least = model.seq_length, decompose_min_length(model, data)
    if data.attention_mask != "document":
        message = "decompose fills samples with unrelated pieces, which must not attend to each other"
        yield Finding("data.packing", message, "data.attention_mask = document")
    if least == 1 and data.eod_mask_loss:
        yield Finding("data.decompose_min_length", "pieces of one token have no label", "2 or more")
    if not _is_power(length):
        message = f"packing = decompose needs a power of two, not {length}"
        yield Finding("model.seq_length", message, _near_powers(length))
    elif not _is_power(least) or least > length:
        message = f"{least} is no power of two up to seq_length = {length}"
        yield Finding("data.decompose_min_length", message, _near_powers(min(least, length)))
    else:
        yield from _turns(data, decomposition(model, batch, data))


def _turns(data: DataConfig, found: Decomposition) -> Iterator[Finding]:
    """Check the curriculum, and that weights of the blend change between turns."""
    unit, of = found.turn, "decompose_bucket_samples"
    if found.odds is not None:
        unit, of = unit * found.cycle, "decompose_bucket_samples x decompose_cycle"
        if len(found.odds) != len(found.pieces):
            message = f"{len(found.odds)} odds for pieces of {', '.join(map(str, found.pieces))} tokens"
            yield Finding("data.curriculum", message, f"{len(found.pieces)} odds")
    elif data.decompose_cycle is not None:
        yield Finding(
            "data.decompose_cycle", "has no effect with curriculum = mixed", "a curriculum, or remove the key"
        )
    for place in (place for place, _ in data.blend_schedule if place % unit):
        message = f"place {place} is no multiple of {of} = {unit}, as it must be with packing = decompose"
        yield Finding("data.blend_schedule", message, f"{place // unit * unit + unit}")


def _is_power(size: int) -> bool:
    return not size & (size - 1)


def _near_powers(size: int) -> str:
    low = int(2 ** (size.bit_length() - 1))
    return f"{low}" if low == size else f"{low} or {2 * low}"


def data_policy(batch: BatchConfig, data: DataConfig) -> Iterator[Finding]:
    """Check that there is a blend that a policy can change, and that its updates are far enough apart."""
    key = "data.blend_policy"
    if data.blend_policy is None:
        return
    if data.mock or not isinstance(data.train, list):
        message = "changes the weights of a blend, and data.train is none"
        yield Finding(key, message, "data.train = [[weight, prefix], ...]")
    if data.blend_schedule:
        yield Finding(key, "and data.blend_schedule both change the weights of the blend", "only one of them")
    if data.packing == "decompose":
        yield Finding(key, "cannot change the weights with packing = decompose", "data.packing = concat or best_fit")
    if data.updates_every < data.prefetch + 2:
        message = f"{data.updates_every} is below prefetch + 2, the steps after which new weights begin"
        yield Finding("data.blend_policy_every", message, f"{data.prefetch + 2} or more")
    if DATA_POLICIES[data.blend_policy].facts.get("uses_losses") and batch.micro != 1:
        message = f"{data.blend_policy} uses the losses by dataset, and a micro-batch of {batch.micro} samples"
        yield Finding(key, f"{message} may have several", "batch.micro = 1")


def chunk_sizes(model: ModelConfig, parallel: ParallelConfig, data: DataConfig) -> Iterator[Finding]:
    """Check the division of a sequence by chunks, and with sp of a chunk by tp ranks."""
    key, tokens, length = "data.sequence_chunk_tokens", data.sequence_chunk_tokens, model.seq_length
    unit = parallel.tp if parallel.sp else 1
    if tokens is None:
        return
    if length % tokens or length == tokens:
        message = f"a sequence of {length} cannot be cut into chunks of {tokens}"
        yield Finding(key, message, f"a divisor of {length}, smaller than it")
    elif tokens % unit:
        message = f"{tokens} tokens cannot be split over tp = {unit} ranks"
        yield Finding(key, message, f"a multiple of {unit} that divides {length}")
    elif data.sequence_chunks_saved > length // tokens:
        chunks = length // tokens
        yield Finding("data.sequence_chunks_saved", f"a sequence has {chunks} chunks", f"at most {chunks}")


def chunk_schedule(parallel: ParallelConfig, data: DataConfig) -> Iterator[Finding]:
    """Check for one model chunk per rank, for state-aware 1F1B."""
    if data.sequence_chunk_tokens is None:
        return
    if parallel.vpp > 1:
        yield Finding("parallel.vpp", f"chunks of sequences have no schedule with vpp = {parallel.vpp}", "1")
    elif parallel.schedule not in (None, "1f1b"):
        message = f"{parallel.schedule} has no order of chunks that depend on each other"
        yield Finding("parallel.schedule", message, "1f1b, or remove the key")
