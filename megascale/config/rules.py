"""Rules between keys of a configuration, and rules for the number of processes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any

from megascale.catalog.backends import AUTO, BACKENDS, Requirement, unmet_requirement
from megascale.catalog.layers import NORMS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.catalog.schedules import SCHEDULES
from megascale.config import stored
from megascale.config.batch_rampup import full_batch_steps
from megascale.config.finding import Finding, Rule
from megascale.config.injection import parse_injection
from megascale.config.run import RunConfig, model_parallel_size


def divisors(n: int, limit: int | None = None) -> list[int]:
    """Divisors of n up to `limit`, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in sorted({*small, *(n // d for d in small)}) if d <= (limit or n)]


def neighbours(values: Sequence[int], target: float) -> list[int]:
    """Return the last of ascending values <= target and the first >= target."""
    return sorted(
        {*values[: bisect.bisect_right(values, target)][-1:], *values[bisect.bisect_left(values, target) :][:1]}
    )


def _join_values(values: list[int]) -> str:
    shown = values if len(values) <= 12 else [*values[:6], "...", *values[-5:]]
    return ", ".join(map(str, shown))


def attention_heads(c: Any) -> Iterator[Finding]:
    """Check that heads without a head_dim of their own divide hidden_size, and that key-value heads divide heads."""
    m = c.model
    if m.explicit_head_dim is None and m.hidden_size % m.num_heads:
        options = divisors(m.hidden_size, 512)
        yield Finding(
            "model.num_heads",
            f"hidden_size {m.hidden_size} is not divisible by {m.num_heads} heads",
            f"one of {_join_values(options)}, or a head_dim",
        )
    if m.num_heads % m.num_kv_heads:
        options = divisors(m.num_heads)
        yield Finding(
            "model.num_kv_heads",
            f"{m.num_heads} heads cannot share {m.num_kv_heads} key-value heads",
            f"one of {_join_values(options)}",
        )


def rope(c: Any) -> Iterator[Finding]:
    """Check that rope rotates pairs of elements, and that its keys have an effect."""
    m = c.model
    scaling = m.rope_scaling or {}
    if m.position != "rope":
        for key, given in (("rope_scaling", m.rope_scaling), ("local_rope_theta", m.local_rope_theta)):
            if given is not None:
                yield Finding(f"model.{key}", f"has no effect with position = {m.position}", "remove the key")
        if m.rotary_fraction != 1:
            yield Finding("model.rotary_fraction", f"has no effect with position = {m.position}", "remove the key")
        return
    if m.explicit_head_dim is None and m.hidden_size % m.num_heads:  # `attention_heads` reports it
        return
    least = 4 if scaling.get("type") == "dynamic" else 2  # the exponent of dynamic scaling is d / (d - 2)
    if m.rotary_dim % 2 or m.rotary_dim < least:
        key = "num_heads" if m.rotary_fraction == 1 else "rotary_fraction"
        of = f"{m.rotary_dim} of {m.head_dim}"
        yield Finding(
            f"model.{key}", f"rope rotates an even number of elements of a head, at least {least}, not {of}",
            "another head_dim or rotary_fraction",
        )  # fmt: skip
    if m.local_rope_theta is not None and not any(map(m.is_local, range(m.num_layers))):
        yield Finding("model.local_rope_theta", "is for layers with a window, and there is none", "remove the key")


def rope_scaling(c: Any) -> Iterator[Finding]:
    """Check that the ends of a scaling's ramp are in order."""
    scaling = c.model.rope_scaling or {}
    ends = {"llama3": ("high_freq_factor", 4.0, "low_freq_factor", 1.0), "yarn": ("beta_fast", 32.0, "beta_slow", 1.0)}
    if scaling.get("type") in ends:
        upper, default_upper, lower, default_lower = ends[scaling["type"]]
        if scaling.get(upper, default_upper) <= scaling.get(lower, default_lower):
            hint = f"for example {default_upper:g} and {default_lower:g}"
            yield Finding("model.rope_scaling", f"{upper} is not above {lower}", hint)
    if scaling.get("type") == "yarn" and c.model.rope_theta <= 1:
        message = f"yarn divides by its logarithm, and {c.model.rope_theta} is not above 1"
        yield Finding("model.rope_theta", message, "for example 10000")


def qk_norm(c: Any) -> Iterator[Finding]:
    """Check that queries and keys have an RMS norm: their norms have a gain alone."""
    m = c.model
    if m.qk_norm != "none" and NORMS[m.norm].facts["mean"]:
        names = [card.name for card in NORMS.cards.values() if not card.facts["mean"]]
        message = f"{m.norm} subtracts a mean, and q and k need an RMS norm"
        yield Finding("model.qk_norm", message, f"norm = {' or '.join(names)}")


def attention_window(c: Any) -> Iterator[Finding]:
    """Check that a list of windows is no longer than the layers."""
    m = c.model
    if isinstance(m.window, list) and len(m.window) > m.num_layers:
        yield Finding(
            "model.window",
            f"{len(m.window)} numbers for {m.num_layers} layers",
            f"at most {m.num_layers}: fewer repeat over the layers",
        )


def tensor_parallel(c: Any) -> Iterator[Finding]:
    """Check that tp divides heads and MLP columns, and with sp the sequence."""
    m, p = c.model, c.parallel
    valid_tp = [t for t in divisors(m.num_kv_heads) if m.ffn_size % t == 0 and m.num_heads % t == 0]
    for count, noun in (
        (m.num_heads, "heads"),
        (m.num_kv_heads, "key-value heads"),
        (m.ffn_size, "columns of the MLP"),
    ):
        if count % p.tp:
            yield Finding(
                "parallel.tp", f"{count} {noun} cannot be split over tp = {p.tp}", f"tp in {_join_values(valid_tp)}"
            )
            break
    if p.sp and m.seq_length % p.tp:
        yield Finding(
            "model.seq_length",
            f"with sp a sequence of {m.seq_length} cannot be split over tp = {p.tp}",
            f"seq_length a multiple of {p.tp}, or sp = false",
        )


def pipeline(c: Any) -> Iterator[Finding]:
    """Check that every chunk has layers; the first may have only the embedding, the last only the head."""
    m, p = c.model, c.parallel
    chunks, layers_per_chunk = p.pp * p.vpp, p.layers_per_chunk
    if p.vpp > 1 and p.pp == 1:
        yield Finding("parallel.vpp", f"vpp = {p.vpp} splits pipeline stages, but pp = 1", "vpp = 1, or pp > 1")
    if layers_per_chunk is None:
        max_chunks = m.num_layers + 2
        if chunks > max_chunks:
            message = f"{m.num_layers} layers are too few for pp x vpp = {p.pp} x {p.vpp} chunks"
            hint = f"vpp at most {max_chunks // p.pp}" if p.pp <= max_chunks else f"pp at most {max_chunks}"
            yield Finding("parallel.pp", message, f"{hint}: only the first and the last chunk may have no layer")
        return
    key, auto = "parallel.layers_per_chunk", "or auto, which splits evenly"
    if len(layers_per_chunk) != chunks:
        yield Finding(
            key, f"{len(layers_per_chunk)} numbers for pp x vpp = {chunks} chunks", f"{chunks} numbers, {auto}"
        )
    elif sum(layers_per_chunk) != m.num_layers:
        message = f"adds up to {sum(layers_per_chunk)}, but num_layers = {m.num_layers}"
        yield Finding(key, message, f"numbers that add up to {m.num_layers}, {auto}")
    elif 0 in layers_per_chunk[1:-1]:
        yield Finding(
            key, "a chunk between first and last has no layer", f"0 only for the first and last chunk, {auto}"
        )


def fp8_shapes(c: Any) -> Iterator[Finding]:
    """Check that FP8 GEMM sizes are multiples of the recipe's alignment, and that some layer runs in FP8."""
    m, p = c.model, c.parallel
    if c.train.precision != "fp8":
        return
    if c.fp8.bf16_first + c.fp8.bf16_last >= m.num_layers:
        message = f"the first {c.fp8.bf16_first} and last {c.fp8.bf16_last} of {m.num_layers} layers leave none in fp8"
        yield Finding("fp8.bf16_first", message, "bf16_first = 0 and bf16_last = 0, or train.precision = bf16")
    alignment, head = RECIPES[c.fp8.recipe].facts["alignment"], m.head_dim
    fused_columns, columns = (m.num_heads + 2 * m.num_kv_heads) * head, "columns of q, k and v on a rank"
    if RECIPES[c.fp8.recipe].facts["granularity"] == "block":  # a block must not span k and v
        fused_columns, columns = m.num_kv_heads * head, "columns of k on a rank"
    for key, size, ranks, noun in (
        ("model.hidden_size", m.hidden_size, 1, "hidden_size"),
        ("model.num_heads", m.num_heads * head, p.tp, "columns of the heads on a rank"),
        ("model.num_kv_heads", fused_columns, p.tp, columns),
        ("model.ffn_size", m.ffn_size, p.tp, "columns of the MLP on a rank"),
        ("model.seq_length", m.seq_length * c.batch.micro, 1, "tokens in a micro-batch"),
    ):
        if size // ranks % alignment:
            message = f"{size // ranks} {noun}: the fp8 recipe {c.fp8.recipe} needs multiples of {alignment}"
            to_change, hint = ("parallel.tp", "fewer ranks") if size % alignment == 0 else (key, "another size")
            yield Finding(to_change, message, f"{hint}, or another fp8.recipe")


def schedule(c: Any) -> Iterator[Finding]:
    """Check that the schedule supports several model chunks per stage."""
    p = c.parallel
    if p.schedule and p.vpp > 1 and not SCHEDULES[p.schedule].facts["multi_chunk"]:
        multi_chunk = [card.name for card in SCHEDULES.cards.values() if card.facts["multi_chunk"]]
        yield Finding(
            "parallel.schedule",
            f"{p.schedule} runs one chunk a stage, but vpp = {p.vpp}",
            f"{' or '.join(multi_chunk)}, or vpp = 1",
        )


def recompute(c: Any) -> Iterator[Finding]:
    """Check that recompute_ops and recompute_chunks have an effect and no duplicates."""
    t = c.train
    if t.recompute_ops is not None and t.recompute != "selective":
        message = f"selects operations for selective recomputation, but recompute = {t.recompute}"
        yield Finding("train.recompute_ops", message, "train.recompute = selective, or remove the key")
    elif len(set(t.recompute_ops or ())) < len(t.recompute_ops or ()):
        yield Finding("train.recompute_ops", "names an operation twice", "remove the duplicate")
    if t.recompute_chunks is not None and t.recompute == "none":
        message = "selects chunks for recomputation, but recompute = none"
        yield Finding("train.recompute_chunks", message, "train.recompute = selective or full, or remove the key")


def recompute_chunks(c: Any) -> Iterator[Finding]:
    """Check that recompute_chunks exist and are unique."""
    missing = sorted(set(c.train.recompute_chunks or ()) - set(range(c.parallel.vpp)))
    if missing:
        last = c.parallel.vpp - 1
        yield Finding(
            "train.recompute_chunks",
            f"with vpp = {c.parallel.vpp} there is no chunk {_join_values(missing)}",
            f"chunks 0 to {last}" if last else "chunk 0, or remove the key",
        )
    elif len(set(c.train.recompute_chunks or ())) < len(c.train.recompute_chunks or ()):
        yield Finding("train.recompute_chunks", "names a chunk twice", "remove the duplicate")


def document_mask(c: Any) -> Iterator[Finding]:
    """Check that keys of packing and of the document mask have an effect."""
    d = c.data
    if d.mock and d.packing != "concat":
        yield Finding("data.packing", "has no effect on mock data", "remove the key")
    given = {"boundary_loss": d.boundary_loss, "eod": d.eod is not None, "document_length": d.document_length}
    for key in (key for key, value in given.items() if value and d.mask != "document"):
        yield Finding(f"data.{key}", f"has no effect with mask = {d.mask}", "mask = document, or remove the key")
    if d.eod is not None and d.eod >= c.model.vocab_size:
        message = f"{d.eod} is no token of a vocabulary of {c.model.vocab_size}"
        yield Finding("data.eod", message, "the id of the end-of-document token")


def batch(c: Any) -> Iterator[Finding]:
    """Check that micro x dp divides the global batch."""
    dp = c.parallel.dp if isinstance(c.parallel.dp, int) else 1
    unit = c.batch.micro * dp
    if c.batch.total % unit:
        near = sorted({max(unit, c.batch.total // unit * unit), (c.batch.total // unit + 1) * unit})
        yield Finding(
            "batch.global",
            f"{c.batch.total} is not divisible by micro x dp = {c.batch.micro} x {dp}",
            f"{' or '.join(map(str, near))}",
        )


def document_order(c: Any) -> Iterator[Finding]:
    """Check that a file of the order of documents has one dataset, which is concatenated."""
    d = c.data
    if d.order is None:
        return
    for found, message, hint in (
        (d.mock, "has no effect on mock data", "remove the key"),
        (isinstance(d.train, list), "is the order of one dataset, and data.train is a blend", "a single dataset"),
        (d.packing != "concat", f"has no effect with packing = {d.packing}", "packing = concat, or remove the key"),
    ):
        if found:
            yield Finding("data.order", message, hint)
            return


def batch_rampup(c: Any) -> Iterator[Finding]:
    """Check that the batch grows to batch.global in whole increments, each of which micro x dp divides."""
    if c.batch.rampup is None:
        return
    start, increment, _ = c.batch.rampup
    unit, key = c.batch.micro * (c.parallel.dp if isinstance(c.parallel.dp, int) else 1), "batch.rampup"
    if start >= c.batch.total or (c.batch.total - start) % increment:
        message = f"the batch does not grow from {start} by {increment} to batch.global = {c.batch.total}"
        yield Finding(key, message, "[start, increment, samples] with a multiple of increment between start and global")
    for name, size in (("start", start), ("increment", increment)):
        if size % unit:
            message = f"{name} {size} is not divisible by micro x dp = {unit}"
            yield Finding(key, message, f"a multiple of {unit}")


def skipped_samples(c: Any) -> Iterator[Finding]:
    """Check that the ranges of data.skip ascend and do not overlap."""
    end = 0
    for start, stop in c.data.skip:
        if start < end or stop <= start:
            message = f"[{start}, {stop}] is empty, or begins before the end of the range before it"
            yield Finding("data.skip", message, "ranges [start, stop] in ascending order, such as [[1000, 2000]]")
            return
        end = stop


def changed_weights(c: Any) -> Iterator[Finding]:
    """Check that data.weights is for the datasets of data.train, and that its places ascend."""
    source = c.data.train
    count = len(source) if isinstance(source, list) else 1
    end, hint = -1, "[[place, [a weight for each dataset of data.train]], ...], with ascending places"
    for place, weights in c.data.weights:
        if len(weights) != count or not sum(weights):
            message = (
                f"{weights} at {place}: data.train has {count} dataset{'s' * (count > 1)}; not all weights may be 0"
            )
            yield Finding("data.weights", message, hint)
        if place <= end:
            yield Finding("data.weights", f"place {place} does not come after {end}", hint)
        end = place


MAX_MICROBATCHES = 2**20
"""Micro-batches of a rank in a step: a schedule lists every action of each."""


def counts(c: Any) -> Iterator[Finding]:
    """Check that tokens of a micro-batch fit 31 bits, and micro-batches of a step in memory."""
    b, dp = c.batch, c.parallel.dp if isinstance(c.parallel.dp, int) else 1
    if b.micro * c.model.seq_length >= 2**31:
        message = f"{b.micro} sequences of {c.model.seq_length} tokens are over 2^31 tokens in a micro-batch"
        yield Finding("batch.micro", message, "a smaller batch.micro or model.seq_length")
    if b.total // (b.micro * dp) > MAX_MICROBATCHES:
        message = f"{b.total // (b.micro * dp)} micro-batches in a step of a rank, over {MAX_MICROBATCHES}"
        yield Finding("batch.global", message, "a smaller batch.global, or a larger batch.micro or parallel.dp")


def learning_rate(c: Any) -> Iterator[Finding]:
    """Check that the learning rate decays, and that warm-up and decay fit into the run."""
    o = c.optimizer
    if o.min_lr > o.lr:
        yield Finding("optimizer.min_lr", f"{o.min_lr:g} is more than lr = {o.lr:g}", f"at most {o.lr:g}")
    steps = full_batch_steps(c)
    if o.warmup_steps >= steps:
        run = f"train.steps = {c.train.steps}"
        if steps != c.train.steps:
            run = f"{steps} steps of batch.global, as many samples as {run} with the ramp-up"
        yield Finding("optimizer.warmup_steps", f"{o.warmup_steps} is not less than {run}", f"fewer than {steps}")
    elif o.decay == "wsd" and (o.decay_steps or 0) > steps - o.warmup_steps:
        steps_left = steps - o.warmup_steps
        yield Finding("optimizer.decay_steps", f"{o.decay_steps} do not fit after the warm-up", f"at most {steps_left}")


def backends(c: Any) -> Iterator[Finding]:
    """Check that a selected backend supports the model, dtype, layout and FP8 recipe."""
    recipe = c.fp8.recipe if c.train.precision == "fp8" else None
    dtype = PRECISIONS[c.train.precision].facts["compute_dtype"]
    for operation, registry in BACKENDS.items():
        requested = getattr(c.backends, operation)
        requirement = Requirement.for_operation(operation, c.model, dtype, c.optimizer.name, c.parallel.tp, recipe)
        requirement = requirement.with_documents() if c.data.mask == "document" else requirement
        if requested != AUTO and (reason := unmet_requirement(registry[requested], requirement)):
            yield Finding(f"backends.{operation}", f"{requested} {reason}", "auto, or another backend")


def timeouts(c: Any) -> Iterator[Finding]:
    """Check that start_timeout_s covers the other timeouts."""
    start, retry_timeout = c.launch.start_timeout_s, c.checkpoint.retry_timeout_s
    if start < c.launch.timeout_s:
        message = f"{start} s is less than launch.timeout_s = {c.launch.timeout_s}"
        yield Finding("launch.start_timeout_s", message, f"{c.launch.timeout_s} or more")
    if c.checkpoint.every and start <= retry_timeout:
        message = (
            f"{start} s is no more than checkpoint.retry_timeout_s = {retry_timeout}, which a rank may spend on a save"
        )
        yield Finding("launch.start_timeout_s", message, f"more than {retry_timeout}")


def nccl_ctas(c: Any) -> Iterator[Finding]:
    """Check that minima do not exceed maxima."""
    for key in ("tp_ctas", "dp_ctas", "pp_ctas", "world_ctas"):
        ctas = getattr(c.nccl, key)
        if isinstance(ctas, list) and ctas[0] > ctas[1]:
            yield Finding(f"nccl.{key}", f"at least {ctas[0]} and at most {ctas[1]}", f"[{ctas[1]}, {ctas[0]}]")


def fault_times(c: Any) -> Iterator[Finding]:
    """Check that the times of `[fault]` nest: heartbeat < flap < lost node, and no verdict before a heartbeat."""
    f = c.fault
    for short, long in (("poll_s", "hang_s"), ("heartbeat_s", "node_lost_s"), ("flap_s", "node_lost_s")):
        low, high = getattr(f, short), getattr(f, long)
        if low >= high:
            yield Finding(f"fault.{long}", f"{high} s is no more than fault.{short} = {low}", f"more than {low}")
    for key in ("start_hang_s", "evaluation_hang_s", "checkpoint_hang_s"):
        if (bound := getattr(f, key)) < f.hang_s:
            yield Finding(f"fault.{key}", f"{bound} s is less than fault.hang_s = {f.hang_s}", f"{f.hang_s} or more")


def launch_findings(c: RunConfig) -> Iterator[Finding]:
    """Check, for a job with a driver, that a rank's own timeouts are longer than what the driver needs for a verdict,
    and that an adapter retries for longer than a flap.
    """
    f, launch = c.fault, c.launch
    for key, limit in (
        ("hang_s", "timeout_s"), ("node_lost_s", "timeout_s"), ("evaluation_hang_s", "timeout_s"),
        ("start_hang_s", "start_timeout_s"), ("checkpoint_hang_s", "start_timeout_s"),
    ):  # fmt: skip
        bound, timeout = getattr(f, key), getattr(launch, limit)
        if bound + f.evidence_s >= timeout:
            message = f"{timeout} s: ranks would give up before the verdict, fault.{key} + fault.evidence_s"
            yield Finding(f"launch.{limit}", message, f"more than {bound + f.evidence_s:g}")
    if c.checkpoint.every and f.checkpoint_hang_s <= (retry := c.checkpoint.retry_timeout_s):
        message = f"{f.checkpoint_hang_s} s is no more than checkpoint.retry_timeout_s = {retry}"
        yield Finding("fault.checkpoint_hang_s", message, f"more than {retry}")
    if (patience := c.nccl.ib_patience_s) <= f.flap_s:
        message = f"adapters give up after {patience:.3g} s, within a flap of fault.flap_s = {f.flap_s}"
        yield Finding("nccl.ib_timeout", message, "a larger exponent")
    elif patience >= launch.timeout_s:
        message = f"adapters retry for {patience:.3g} s, longer than launch.timeout_s = {launch.timeout_s}"
        yield Finding("nccl.ib_timeout", message, "a smaller exponent, or a longer launch.timeout_s")


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("model",), attention_heads),
    (("model",), rope),
    (("model",), rope_scaling),
    (("model",), qk_norm),
    (("model",), attention_window),
    (("model", "parallel"), tensor_parallel),
    (("model", "parallel"), pipeline),
    (("model", "parallel", "batch", "train", "fp8"), fp8_shapes),
    (("parallel",), schedule),
    (("train",), recompute),
    (("parallel", "train"), recompute_chunks),
    (("parallel", "batch"), batch),
    (("parallel", "batch"), batch_rampup),
    (("model", "parallel", "batch", "train", "data"), counts),
    (("data",), skipped_samples),
    (("data",), changed_weights),
    (("data",), document_order),
    (("model", "data"), document_mask),
    (("batch", "train", "optimizer"), learning_rate),
    (("model", "parallel", "train", "fp8", "optimizer", "backends", "data"), backends),
    *stored.RULES,
    (("launch", "checkpoint"), timeouts),
    (("nccl",), nccl_ctas),
    (("fault",), fault_times),
)
"""(sections that the rule reads, rule). A rule runs if its sections are tables, whatever else is wrong."""


def world_findings(c: RunConfig, world_size: int) -> Iterator[Finding]:
    """Check the layout, the batch and injected faults against the number of processes."""
    for fault in parse_injection(c.fault.inject).faults:
        if fault.rank is not None and fault.rank >= world_size:
            yield Finding("fault.inject", f"there is no rank {fault.rank}", f"a rank from 0 to {world_size - 1}")
    p, replica = c.parallel, model_parallel_size(c.parallel)
    shape = f"tp {p.tp} x cp {p.cp} x pp {p.pp}"
    micro_batches, uneven = divmod(c.batch.total, c.batch.micro)
    if isinstance(p.dp, int):
        if replica * p.dp != world_size:
            divides = world_size % replica == 0 and (uneven or micro_batches % (world_size // replica) == 0)
            hint = f"dp = {world_size // replica}" if divides else f"start {replica * p.dp} processes"
            yield Finding(
                "parallel.dp", f"{shape} x dp {p.dp} = {replica * p.dp}, but there are {world_size} processes", hint
            )
        return
    if world_size % replica:
        replicas = neighbours(range(1, world_size + 1) if uneven else divisors(micro_batches), world_size / replica)
        yield Finding(
            "parallel.tp",
            f"{world_size} {'processes are' if world_size > 1 else 'process is'} not a multiple of {shape} = {replica}",
            f"start {' or '.join(str(replica * dp) for dp in replicas)}",
        )
        return
    if not uneven:  # else the rule `batch` has reported
        yield from batch(c.resolve(world_size))
        yield from batch_rampup(c.resolve(world_size))
