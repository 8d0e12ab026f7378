"""Rules of `[parallel]`: what the axes of parallelism divide, and what ranks share."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megascale.catalog.layers import BLOCKS
from megascale.catalog.schedules import SCHEDULES
from megascale.config.backends import Fp8Config
from megascale.config.data import DataConfig
from megascale.config.exclusions import only, unless, unsupported
from megascale.config.finding import Finding, divisors, join_values
from megascale.config.model import ModelConfig
from megascale.config.moe import MOST_BLOCKS, MoeConfig
from megascale.config.parallel import OverlapConfig, ParallelConfig
from megascale.config.train import BatchConfig, TrainConfig, may_have

EXACT_SCALES = (
    "other tokens with a common scale change 62% to 97% of the values in wgrad; with scale = pow2 those of subnormal "
    "codes alone, about 1% at most"
)


def tensor_parallel(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Finding]:
    """Check that tp divides heads and MLP columns, and with sp the sequence."""
    tp, heads, kv_heads = parallel.tp, model.num_heads, model.num_kv_heads
    columns, shared = 0 if model.experts and not model.dense_layers else model.ffn_size, model.shared_ffn_size
    valid = [t for t in divisors(kv_heads) if not (columns % t or heads % t or shared % t)]
    for count, noun in (
        (heads, "heads"), (kv_heads, "key-value heads"), (columns, "columns of the MLP"),
        (shared, "columns of the shared expert"),
    ):  # fmt: skip
        if count % tp:
            message = f"{count} {noun} cannot be split over tp = {tp}"
            yield Finding("parallel.tp", message, f"tp in {join_values(valid)}")
            break
    if parallel.sp and model.seq_length % tp:
        message = f"with sp a sequence of {model.seq_length} cannot be split over tp = {tp}"
        yield Finding("model.seq_length", message, f"seq_length a multiple of {tp}, or sp = false")


def domino(
    model: ModelConfig, parallel: ParallelConfig, overlap: OverlapConfig, batch: BatchConfig, train: TrainConfig,
    fp8: Fp8Config, data: DataConfig,
) -> Iterator[Finding]:  # fmt: skip
    """Check that a micro-batch has two halves, of whole sequences, and that layers and scales compute each alone."""
    if overlap.tp != "domino":
        return
    facts = fp8.facts
    of_tokens = train.quantizes and (facts["covers_tokens"] or model.seq_length % (facts["token_run"] or 1) > 0)
    for key, fails, message, hint in (
        ("parallel.tp", parallel.tp == 1, "one rank has no tp collectives", "tp above 1"),
        ("batch.micro", batch.micro % 2, f"{batch.micro} sequences have no two equal halves", "an even number"),
        ("model.block", not BLOCKS[model.block].facts.get("steps"), "the block does not compute in steps",
         "a model.block.SteppedBlock, whose card has the fact steps"),
        ("model.experts", model.experts, "experts balance whole micro-batches", "0"),
        ("model.mtp_layers", model.mtp_layers, "MTP layers read whole micro-batches", "0"),
        ("model.exits", model.exits, "exits read whole micro-batches", "[]"),
        ("train.mlp_tiles", train.mlp_tiles > 1, "tiles run one after another", "1"),
        ("data.sequence_chunk_tokens", data.sequence_chunk_tokens, "a chunk's keys are of whole micro-batches",
         "remove the key"),
        ("fp8.recipe", of_tokens, f"{fp8.recipe} has scales of a micro-batch's tokens, not of a half's",
         "static, or blockwise with sequences of whole blocks"),
    ):  # fmt: skip
        if fails:
            yield Finding(key, f"{message} (overlap.tp = domino)", f"{hint}, or overlap.tp = true")


def pipeline(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Finding]:
    """Check that every chunk has layers; the first may have only the embedding, the last only the head."""
    pp, vpp, layers_per_chunk = parallel.pp, parallel.vpp, parallel.layers_per_chunk
    if vpp > 1 and pp == 1:
        yield Finding("parallel.vpp", f"vpp = {vpp} splits pipeline stages, but pp = 1", "vpp = 1, or pp > 1")
    if layers_per_chunk is None:
        max_chunks = model.num_layers + 2
        if pp * vpp > max_chunks:
            message = f"{model.num_layers} layers are too few for pp x vpp = {pp} x {vpp} chunks"
            hint = f"{'pp x vpp' if vpp > 1 else 'pp'} at most {max_chunks}"
            yield Finding("parallel.pp", message, f"{hint}: only the first and the last chunk may have no layer")
        return
    message = ""
    if len(layers_per_chunk) != pp * vpp:
        message, hint = f"{len(layers_per_chunk)} numbers for pp x vpp = {pp * vpp} chunks", f"{pp * vpp} numbers"
    elif sum(layers_per_chunk) != model.num_layers:
        message = f"adds up to {sum(layers_per_chunk)}, but num_layers = {model.num_layers}"
        hint = f"numbers that add up to {model.num_layers}"
    elif 0 in layers_per_chunk[1:-1]:
        message, hint = "a chunk between first and last has no layer", "0 only for the first and last chunk"
    if message:
        yield Finding("parallel.layers_per_chunk", message, f"{hint}, or auto, which splits evenly")


def schedule(parallel: ParallelConfig) -> Iterator[Finding]:
    """Check that the schedule supports the number of model chunks per stage."""
    if not parallel.schedule:
        return
    only, vpp = SCHEDULES[parallel.schedule].facts["v"], parallel.vpp
    if only == 1 and vpp > 1:
        suited = [name for name, card in SCHEDULES.cards.items() if card.facts["v"] in (None, vpp)]
        message = f"{parallel.schedule} runs one chunk a stage, but vpp = {vpp}"
        yield Finding("parallel.schedule", message, f"{' or '.join(suited)}, or vpp = 1")
    elif only not in (None, vpp):
        message = f"{parallel.schedule} runs {only} chunks a stage, but vpp = {vpp}"
        yield Finding("parallel.vpp", message, f"vpp = {only}" + " and pp above 1" * (parallel.pp == 1))


def skipped_stages(parallel: ParallelConfig, batch: BatchConfig) -> Iterator[Finding]:
    """Check that every stage is left with a micro-batch in every step."""
    m = batch.total // (batch.micro * parallel.dp) if isinstance(parallel.dp, int) else 0
    if m and parallel.skip_ratio * m > m - 1:
        message = f"leaves some stage none of the {m} micro-batches in a step of a rank"
        most = f"at most {math.floor(100 - 100 / m) / 100}, or " if m > 1 else ""
        yield Finding("parallel.skip_ratio", message, f"{most}a larger batch")


def paired_experts(
    model: ModelConfig, parallel: ParallelConfig, moe: MoeConfig, train: TrainConfig
) -> Iterator[Finding]:
    """Check that layers with experts have segments, in which a schedule's pairs hide the exchange of tokens."""
    if not model.experts or not parallel.schedule or not SCHEDULES[parallel.schedule].facts["pairs"]:
        return
    why = f"the exchange of tokens is hidden by another micro-batch (parallel.schedule = {parallel.schedule})"
    if moe.token_blocks > 1:
        yield Finding("moe.token_blocks", f"not between blocks: {why}", "1, or interleaved_1f1b")
    if train.memory != "auto" and may_have(train, "full", "full_host", "host", "nvme"):
        message = f"not in a layer that is recomputed or moved: {why}"
        yield Finding("train.memory" if train.memory else "train.recompute", message, "selective, or interleaved_1f1b")


SHARDED_WEIGHTS = unsupported(
    "parallel.zero",
    ("model.mtp_layers", only(0), "MTP layers use the head's weights again", "0"),
    ("model.exits", only([]), "an evaluation leaves out exits", "[]"),
    ("overlap.bucket_bytes", only("auto"), "every layer has a bucket", "auto"),
    ("overlap.tp", unless("domino"), "two halves of a micro-batch are in different layers", "true"),
    ("parallel.vocab_pp", only(0), "passes use the vocabulary's weights at any time", "0"),
    when=only(3), off="parallel.zero = 2",
)  # fmt: skip


def released_weights(parallel: ParallelConfig) -> Iterator[Finding]:
    """Check the time of the release of gathered weights beside zero, model chunks and schedule."""
    reshard, facts = parallel.resharding, SCHEDULES[parallel.schedule].facts if parallel.schedule else {}
    if reshard is None and parallel.reshard is not None:
        message = f"gathered weights are never released (parallel.zero = {parallel.zero})"
        yield Finding("parallel.reshard", message, "parallel.zero = 3, or remove the key")
    elif reshard == "microbatch" and parallel.vpp == 1:
        message = "a stage has one model chunk, and never turns to another"
        yield Finding("parallel.reshard", message, "keep, or parallel.vpp above 1")
    elif reshard not in (None, "keep") and facts.get("pairs"):
        message = f"two micro-batches are in different layers (parallel.schedule = {parallel.schedule})"
        yield Finding("parallel.reshard", message, "keep")


def hybrid_sharding(parallel: ParallelConfig) -> Iterator[Finding]:
    """Check that groups of dp_shard neighbours fill dp, have something to shard, and hold each expert equally often."""
    key, inner, dp, zero = "parallel.dp_shard", parallel.dp_shard, parallel.dp, parallel.zero
    if parallel.state_shard == "all" and (inner is None or zero < 3):
        shown = "unset" if inner is None else f"= {inner}"
        message = f"has no effect with parallel.dp_shard {shown} and parallel.zero = {zero}"
        yield Finding("parallel.state_shard", message, "dp_shard and zero = 3, or remove the key")
    elif parallel.state_shard == "all" and inner == dp:
        message = f"has no effect: dp_shard = {inner} leaves no copies"
        yield Finding("parallel.state_shard", message, "a smaller dp_shard, or remove the key")
    if inner is None:
        return
    ranks = parallel.tp * parallel.cp * inner
    if zero == 0:
        yield Finding(key, "ranks shard nothing (parallel.zero = 0)", "parallel.zero = 1, 2 or 3, or remove the key")
    elif inner * parallel.cp == 1:
        yield Finding(key, "a rank alone has no one to shard with", "2 or more, or parallel.zero = 0")
    elif isinstance(dp, int) and dp % inner:
        valid = [ranks for ranks in divisors(dp) if ranks * parallel.cp > 1]
        yield Finding(
            key, f"{inner} does not divide dp = {dp}", f"one of {join_values(valid)}" if valid else "remove the key"
        )
    elif ranks % parallel.ep:
        message = f"the {ranks} ranks that shard (tp x cp x dp_shard) do not hold all experts (ep = {parallel.ep})"
        least = parallel.ep // math.gcd(parallel.ep, parallel.tp * parallel.cp)
        yield Finding(key, message, f"a multiple of {least}")


def coded_gradients(parallel: ParallelConfig) -> Iterator[Finding]:
    """Check that gradients that travel as FP8 codes go to ranks that shard."""
    if parallel.grad_reduce == "fp8" and parallel.zero == 0:
        message = "every rank needs the whole sum (parallel.zero = 0), which FP8 would round again"
        yield Finding("parallel.grad_reduce", message, "parallel.zero = 1, 2 or 3, or remove the key")


def cp_modes(parallel: ParallelConfig) -> Iterator[Finding]:
    """Check that the keys of context parallelism have an effect, and that usp says how many ranks exchange heads."""
    cp, mode, ranks, key = parallel.cp, parallel.cp_mode, parallel.cp_a2a_size, "parallel.cp_a2a_size"
    if ranks > 1 and mode != "usp":
        yield Finding(key, f"has no effect with cp_mode = {mode}", "cp_mode = usp, or remove the key")
    elif ranks == 1 and mode == "usp" and cp > 1:
        yield Finding(key, "usp needs the number of neighbouring ranks that exchange heads", "2 or more")
    elif cp % ranks:
        yield Finding(key, f"{ranks} ranks that exchange heads do not divide cp = {cp}", f"a divisor of {cp}")


def cp_sequence(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Finding]:
    """Check that ranks, and with sp their tp ranks, share a sequence in equal parts."""
    cp, keys = parallel.cp, parallel.cp_keys
    if cp == 1 or cp % parallel.cp_heads or parallel.hybrid_dp:
        return
    unit = cp * (parallel.tp if parallel.sp else 1)
    halves = 2 * keys if keys > 1 else 1  # a chunk near the head and one near the tail
    ranks = f"cp x tp = {unit} ranks" if parallel.sp else f"cp = {cp}"
    for divisor, what in ((halves, f"2 x {keys} chunks"), (unit, ranks)):
        if model.seq_length % divisor:
            message = f"a sequence of {model.seq_length} cannot be split into {what}"
            yield Finding("model.seq_length", message, f"a multiple of {math.lcm(halves, unit)}")
            return


def cp_heads(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Finding]:
    """Check that ranks that exchange heads get equal numbers of them, and whole groups of key-value heads or one."""
    ranks, tp = parallel.cp_heads, parallel.tp
    if ranks == 1 or model.num_heads % tp or model.num_kv_heads % tp:
        return
    key = "parallel.cp_a2a_size" if parallel.cp_mode == "usp" else "parallel.cp"
    queries, keys = model.num_heads // tp, model.num_kv_heads // tp
    if queries % ranks:
        message = f"{queries} heads of a tp rank cannot be split over {ranks} ranks that exchange heads"
        yield Finding(key, message, "fewer ranks, cp_mode = ring or allgather, or usp with fewer neighbours")
    elif keys % ranks and ranks % keys:
        message = f"{keys} key-value heads of a tp rank can neither be split over {ranks} ranks nor repeated for them"
        yield Finding(key, message, "ranks that divide the key-value heads, or a multiple of them")


def cp_fp8(
    model: ModelConfig, parallel: ParallelConfig, batch: BatchConfig, train: TrainConfig, fp8: Fp8Config
) -> Iterator[Finding]:
    """Check that the tokens of a rank, and with scales of blocks the consecutive ones of a sequence, are multiples of
    what the FP8 recipe needs.
    """
    facts, cp, keys = fp8.facts, parallel.cp, parallel.cp_keys
    if not train.quantizes or cp == 1 or cp % parallel.cp_heads or parallel.hybrid_dp:
        return
    runs = keys * math.lcm(2, parallel.cp_heads) if keys > 1 else cp
    if facts["token_run"]:
        tokens, alignment, which = model.seq_length // runs, facts["token_run"], "consecutive tokens of a sequence"
    else:
        tokens, alignment = model.seq_length * batch.micro // cp, facts["alignment"]
        which = "tokens of a micro-batch"
    if tokens % alignment:
        message = f"{tokens} {which} on a rank along cp"
        needs = f"the fp8 recipe {fp8.recipe} needs multiples of {alignment}"
        yield Finding("parallel.cp", f"{message}: {needs}", "fewer ranks, a longer sequence, or another fp8.recipe")


def cp_combinations(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Finding]:
    """Check that no key is set that has no implementation for ranks that share sequences."""
    cp, mode = parallel.cp, parallel.cp_mode
    if cp == 1 or parallel.hybrid_dp:
        return
    if model.dropout:
        yield Finding("model.dropout", f"context parallelism (cp = {cp}) has no dropout", "dropout = 0, or cp = 1")
    if model.attention_softcap is not None and parallel.cp_keys > 1:
        message = f"attention with a soft cap needs all keys at once, and cp_mode = {mode} has some at a time"
        yield Finding("parallel.cp_mode", message, "ulysses")


def cp_sharding(
    parallel: ParallelConfig, batch: BatchConfig, train: TrainConfig, fp8: Fp8Config, data: DataConfig
) -> Iterator[Finding]:
    """Check that a run whose ranks shall hold chunks of documents can cut them."""
    if parallel.cp_sharding != "document":
        return
    if data.attention_mask != "document":
        message, hint = "chunks of documents need data.attention_mask = document", "data.attention_mask = document"
    elif parallel.cp > 1 and parallel.cp_keys == 1:
        given = "hybrid_dp = true" if parallel.hybrid_dp else f"cp_mode = {parallel.cp_mode}"
        message, hint = f"has no effect with {given}", "cp_mode = ring, allgather or usp"
    elif batch.micro > 1:
        message, hint = f"the {batch.micro} rows of a micro-batch have different documents", "batch.micro = 1"
    elif train.quantizes and fp8.facts["token_run"] and not fp8.facts["free_borders"]:
        message = f"the fp8 recipe {fp8.recipe} has scales of consecutive tokens, and {EXACT_SCALES}"
        hint = 'fp8.scale = "pow2", or another fp8.recipe'
    else:
        return
    yield Finding("parallel.cp_sharding", message, f"{hint}; or cp_sharding = auto")


def hybrid_fp8(parallel: ParallelConfig, train: TrainConfig, fp8: Fp8Config, data: DataConfig) -> Iterator[Finding]:
    """Check that FP8 values hardly depend on which documents a rank has in a micro-batch, which has whole blocks."""
    facts, tokens = fp8.facts, data.max_tokens_per_rank
    if not parallel.hybrid_dp or not train.quantizes:
        return
    if not facts["free_borders"]:
        message = f"ranks have other tokens together than without hybrid_dp, and {EXACT_SCALES}"
        yield Finding("fp8.scale", message, 'pow2 with fp8.recipe = rowwise or blockwise, or train.precision = "bf16"')
    elif tokens is not None and tokens % facts["alignment"]:
        message = f"{tokens} tokens: the fp8 recipe {fp8.recipe} needs multiples of {facts['alignment']}"
        yield Finding("data.max_tokens_per_rank", message, "another number, or another fp8.recipe")


def hybrid_tokens(model: ModelConfig, parallel: ParallelConfig, data: DataConfig) -> Iterator[Finding]:
    """Check that the pool of hybrid data parallelism has room for the longest document."""
    if not parallel.hybrid_dp:
        return
    key, tokens = "data.max_tokens_per_rank", data.max_tokens_per_rank
    if tokens is None:
        yield Finding(key, "hybrid_dp needs the most tokens of a rank in a micro-batch", "a number")
    elif isinstance(parallel.dp, int) and (ranks := parallel.dp * parallel.cp) * tokens < model.seq_length:
        message = f"{ranks} ranks hold {ranks * tokens} tokens, and a document may have {model.seq_length}"
        yield Finding(key, message, f"{-(-model.seq_length // ranks)} or more")


def expert_parallel(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Finding]:
    """Check that ep divides experts and the ranks of a pipeline stage, and that tp ranks route different tokens."""
    ep, experts = parallel.ep, model.experts
    if not experts:
        if ep > 1:
            yield Finding("parallel.ep", f"{ep} ranks share experts, and model.experts is 0", "1, or model.experts")
        return
    if parallel.tp > 1 and not parallel.sp:
        message = f"the {parallel.tp} ranks of tp would route the same tokens to experts"
        yield Finding("parallel.sp", message, "sp = true, or tp = 1")
    ranks = parallel.tp * parallel.cp * (parallel.dp if isinstance(parallel.dp, int) else ep)
    common = math.gcd(experts, ranks) if isinstance(parallel.dp, int) else experts
    if experts % ep:
        message = f"{experts} experts cannot be split over ep = {ep}"
    elif ranks % ep:
        message = f"ep = {ep} does not divide the {ranks} ranks of a pipeline stage (tp x cp x dp)"
    else:
        return
    hint = f"one of {join_values(divisors(common))}" if common > 1 else f"1, or a stage of more ranks: {experts}"
    yield Finding("parallel.ep", message, hint)


def balance_group(parallel: ParallelConfig, batch: BatchConfig, moe: MoeConfig) -> Iterator[Finding]:
    """Check that groups of samples with a balance loss are in one micro-batch, of all data-parallel ranks."""
    group, key = moe.balance_group, "moe.balance_group"
    if moe.balance != "group" or not isinstance(parallel.dp, int):
        return
    samples = batch.micro * parallel.dp
    if samples % group:
        message = f"groups of {group} do not divide the {samples} samples of a micro-batch on all ranks (micro x dp)"
        yield Finding(key, message, f"one of {join_values(divisors(samples))}")


def token_blocks(
    model: ModelConfig, parallel: ParallelConfig, batch: BatchConfig, moe: MoeConfig, data: DataConfig
) -> Iterator[Finding]:
    """Check that the blocks of a rank's tokens are of one size."""
    blocks, length = moe.token_blocks, data.sequence_chunk_tokens or model.seq_length
    if (tokens := batch.micro * length // (parallel.cp * parallel.tp)) % blocks:
        message = f"the {tokens} tokens of a rank cannot be cut into {blocks} blocks"
        yield Finding("moe.token_blocks", message, f"one of {join_values(divisors(tokens, MOST_BLOCKS))}")
