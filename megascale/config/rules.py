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
from megascale.config import (
    chunk_rules,
    data_rules,
    decomposition,
    hybrid_rules,
    injection_rules,
    policy_rules,
    sequence_sharing,
    stored,
    tile_rules,
    timeout_rules,
)
from megascale.config.batch_rampup import full_batch_steps
from megascale.config.finding import Finding, Rule
from megascale.config.run import RunConfig, model_parallel_size
from megascale.config.train import OptimizerConfig
from megascale.core.registry import Card


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


def positions(c: Any) -> Iterator[Finding]:
    """Check that learned positions reach to the end of a sequence."""
    m = c.model
    if m.positions is not None and m.position != "learned":
        yield Finding("model.positions", f"has no effect with position = {m.position}", "remove the key")
    elif m.positions is not None and m.positions < m.seq_length:
        message = f"{m.positions} learned positions are fewer than the {m.seq_length} of a sequence"
        yield Finding("model.positions", message, f"seq_length of at most {m.positions}, or remove the key")


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
    if not c.train.quantizes:
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


def activation_offload(c: Any) -> Iterator[Finding]:
    """Check that block inputs are what is saved for backward."""
    if c.train.activation_offload and c.train.recompute != "full":
        message = f"keeps the block inputs that full recomputation saves, but recompute = {c.train.recompute}"
        yield Finding("train.activation_offload", message, "train.recompute = full, or false")


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


def noise_scale(c: Any) -> Iterator[Finding]:
    """Check that a step has the gradient of one micro-batch to compare with that of the whole batch."""
    t, p, key = c.train, c.parallel, "train.noise_scale_every"
    if not t.noise_scale_every:
        return
    if c.batch.total <= c.batch.micro:
        message = f"a step of one micro-batch of {c.batch.micro} has no smaller batch to compare with"
        yield Finding(key, message, "a larger batch.global, a smaller batch.micro, or 0")
    if p.schedule and SCHEDULES[p.schedule].facts["unbounded_in_flight"]:
        bounded = [card.name for card in SCHEDULES.cards.values() if not card.facts["unbounded_in_flight"]]
        message = f"{p.schedule} computes the head's gradient of all micro-batches before it ends the first backward"
        yield Finding(key, message, f"parallel.schedule = {' or '.join(bounded)}, or 0")


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


def width_transfer(c: Any) -> Iterator[Finding]:
    """Check that the head is a weight of its own, with its own scale and learning rate under muP."""
    if c.model.mup_base_width and c.model.tie_embeddings:
        message = "the head's scale and learning rate are not the token embedding's under muP"
        yield Finding("model.mup_base_width", message, "tie_embeddings = false, or remove the key")


def compensated_weights(c: Any) -> Iterator[Finding]:
    """Check that compensated weights are those of bf16 training, by rules that add in fp32."""
    if c.optimizer.master == "full":
        return
    facts, where = PRECISIONS[c.train.precision].facts, "optimizer.master"
    if not (facts["master_weights"] and facts["compute_dtype"] == "bfloat16"):
        yield Finding(
            where, f"there are no bf16 weights with precision = {c.train.precision}", "bf16, or remove the key"
        )
    if c.optimizer.name == "lamb":
        yield Finding(where, "lamb needs master weights in fp32", "full, or another optimizer")
    if c.backends.optimizer != AUTO:
        yield Finding("backends.optimizer", "is for master weights in fp32", "auto, or optimizer.master = full")


def step_guard(c: Any) -> Iterator[Finding]:
    """Check that keys of guards against spikes are those of a guard that is on."""
    guards = {"zclip": ("zclip_threshold", "zclip_alpha", "zclip_warmup"), "skip_sigma": ("skip_window",)}
    for switch, keys in guards.items():
        for key in keys if not getattr(c.optimizer, switch) else ():
            if getattr(c.optimizer, key) != OptimizerConfig.model_fields[key].default:
                yield Finding(f"optimizer.{key}", f"has no effect without {switch}", f"optimizer.{switch}, or no {key}")


_GROUP_FINDINGS = Card("param_groups", "rules of parameter groups", "megascale.layout.param_groups:group_findings")
"""By name, like an implementation: the parameters of a model are a layer above configuration."""


def optimizer_groups(c: Any) -> Iterator[Finding]:
    """Check options of the optimizer, and that every parameter is in one group."""
    if c.optimizer.groups or c.optimizer.options or c.model.mup_base_width:
        yield from _GROUP_FINDINGS.load()(c)


def backends(c: Any) -> Iterator[Finding]:
    """Check that a selected backend supports the model, dtype, layout and FP8 recipe."""
    recipe = c.fp8.recipe if c.train.quantizes else None
    dtype = PRECISIONS[c.train.precision].facts["compute_dtype"]
    for operation, registry in BACKENDS.items():
        requested = getattr(c.backends, operation)
        in_parts = bool(c.parallel.cp_keys > 1 or c.parallel.cp_mode == "hybrid" or c.data.chunk_tokens)
        requirement = Requirement.for_operation(
            operation,
            c.model,
            dtype,
            c.optimizer.name,
            c.parallel.tp,
            recipe,
            document_mask=c.data.mask == "document",
            attends_in_parts=in_parts,
        )
        if requested != AUTO and (reason := unmet_requirement(registry[requested], requirement)):
            yield Finding(f"backends.{operation}", f"{requested} {reason}", "auto, or another backend")


def nccl_ctas(c: Any) -> Iterator[Finding]:
    """Check that minima do not exceed maxima."""
    for key in ("tp_ctas", "cp_ctas", "dp_ctas", "pp_ctas", "world_ctas"):
        ctas = getattr(c.nccl, key)
        if isinstance(ctas, list) and ctas[0] > ctas[1]:
            yield Finding(f"nccl.{key}", f"at least {ctas[0]} and at most {ctas[1]}", f"[{ctas[1]}, {ctas[0]}]")


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("model",), attention_heads),
    (("model",), positions),
    (("model",), rope),
    (("model",), rope_scaling),
    (("model",), qk_norm),
    (("model",), attention_window),
    (("model", "parallel"), tensor_parallel),
    (("model", "parallel"), pipeline),
    (("model", "parallel", "batch", "train", "fp8"), fp8_shapes),
    (("parallel",), schedule),
    (("train",), recompute),
    (("train",), activation_offload),
    (("parallel", "train"), recompute_chunks),
    (("parallel", "batch"), batch),
    (("parallel", "batch"), batch_rampup),
    (("model", "parallel", "batch", "train", "data"), counts),
    (("parallel", "batch", "train"), noise_scale),
    *data_rules.RULES,
    *decomposition.RULES,
    *policy_rules.RULES,
    *sequence_sharing.RULES,
    *chunk_rules.RULES,
    *hybrid_rules.RULES,
    *tile_rules.RULES,
    (("batch", "train", "optimizer"), learning_rate),
    (("model", "optimizer"), optimizer_groups),
    (("model",), width_transfer),
    (("optimizer", "train", "backends"), compensated_weights),
    (("optimizer",), step_guard),
    (("model", "parallel", "train", "fp8", "optimizer", "backends", "data"), backends),
    *stored.RULES,
    (("nccl",), nccl_ctas),
    *timeout_rules.RULES,
    *injection_rules.RULES,
)
"""(sections that the rule reads, rule). A rule runs if its sections are tables, whatever else is wrong."""


def world_findings(c: RunConfig, world_size: int) -> Iterator[Finding]:
    """Check the layout, the batch and injected faults against the number of processes."""
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
    yield from injection_rules.unknown_ranks(c, world_size)  # else a rule has
    if world_size % replica:
        replicas = neighbours(range(1, world_size + 1) if uneven else divisors(micro_batches), world_size / replica)
        yield Finding(
            "parallel.tp",
            f"{world_size} {'processes are' if world_size > 1 else 'process is'} not a multiple of {shape} = {replica}",
            f"start {' or '.join(str(replica * dp) for dp in replicas)}",
        )
        return
    if p.dp == "auto":
        yield from hybrid_rules.hybrid_keys(c.resolve(world_size))
    if not uneven:  # else the rule `batch` has reported
        yield from batch(c.resolve(world_size))
        yield from batch_rampup(c.resolve(world_size))
