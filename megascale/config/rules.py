"""The rules that concern more than one key of a configuration, and those of a job's size."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any

from megascale.catalog.backends import AUTO, BACKENDS, Need, lacks
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.catalog.schedules import SCHEDULES
from megascale.config import stored
from megascale.config.finding import Finding, Rule
from megascale.config.run import RunConfig, replicas_of


def divisors(n: int, limit: int | None = None) -> list[int]:
    """The whole numbers that divide n, up to `limit`."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in sorted({*small, *(n // d for d in small)}) if d <= (limit or n)]


def around(values: Sequence[int], target: float) -> list[int]:
    """Of ascending values the last that is no more, and the first that is no less."""
    return sorted(
        {*values[: bisect.bisect_right(values, target)][-1:], *values[bisect.bisect_left(values, target) :][:1]}
    )


def _listed(values: list[int]) -> str:
    shown = values if len(values) <= 12 else [*values[:6], "...", *values[-5:]]
    return ", ".join(map(str, shown))


def heads(c: Any) -> Iterator[Finding]:
    """Widths divide into heads, and heads into groups that share keys and values."""
    m = c.model
    if m.hidden_size % m.num_heads:
        options = divisors(m.hidden_size, 512)
        yield Finding(
            "model.num_heads",
            f"hidden_size {m.hidden_size} is not divisible by {m.num_heads} heads",
            f"one of {_listed(options)}",
        )
    elif m.position == "rope" and m.head_dim % 2:
        yield Finding(
            "model.num_heads", f"rope needs an even head size, not {m.head_dim}", "change hidden_size or num_heads"
        )
    if m.num_heads % m.num_kv_heads:
        options = divisors(m.num_heads)
        yield Finding(
            "model.num_kv_heads",
            f"{m.num_heads} heads cannot share {m.num_kv_heads} key-value heads",
            f"one of {_listed(options)}",
        )


def window(c: Any) -> Iterator[Finding]:
    """A pattern of windows has no more entries than there are layers."""
    m = c.model
    if isinstance(m.window, list) and len(m.window) > m.num_layers:
        yield Finding(
            "model.window",
            f"{len(m.window)} numbers for {m.num_layers} layers",
            f"at most {m.num_layers}: fewer repeat over the layers",
        )


def tensor_parallel(c: Any) -> Iterator[Finding]:
    """Heads and MLP columns are split over tp; with sp the sequence is too."""
    m, p = c.model, c.parallel
    both = [t for t in divisors(m.num_kv_heads) if m.ffn_size % t == 0 and m.num_heads % t == 0]
    for number, what in (
        (m.num_heads, "heads"),
        (m.num_kv_heads, "key-value heads"),
        (m.ffn_size, "columns of the MLP"),
    ):
        if number % p.tp:
            yield Finding("parallel.tp", f"{number} {what} cannot be split over tp = {p.tp}", f"tp in {_listed(both)}")
            break
    if p.sp and m.seq_length % p.tp:
        yield Finding(
            "model.seq_length",
            f"with sp a sequence of {m.seq_length} cannot be split over tp = {p.tp}",
            f"seq_length a multiple of {p.tp}, or sp = false",
        )


def pipeline(c: Any) -> Iterator[Finding]:
    """Every chunk has layers, but for the first and the last, which may have the embedding and the head alone."""
    m, p = c.model, c.parallel
    chunks, given = p.pp * p.vpp, p.layers_per_chunk
    if p.vpp > 1 and p.pp == 1:
        yield Finding("parallel.vpp", f"vpp = {p.vpp} splits pipeline stages, but pp = 1", "vpp = 1, or pp > 1")
    if given is None:
        most = m.num_layers + 2
        if chunks > most:
            found = f"{m.num_layers} layers are too few for pp x vpp = {p.pp} x {p.vpp} chunks"
            mend = f"vpp at most {most // p.pp}" if p.pp <= most else f"pp at most {most}"
            yield Finding("parallel.pp", found, f"{mend}: only the first and the last chunk may have no layer")
        return
    key, auto = "parallel.layers_per_chunk", "or auto, which cuts evenly"
    if len(given) != chunks:
        yield Finding(key, f"{len(given)} numbers for pp x vpp = {chunks} chunks", f"{chunks} numbers, {auto}")
    elif sum(given) != m.num_layers:
        found = f"adds up to {sum(given)}, but num_layers = {m.num_layers}"
        yield Finding(key, found, f"numbers that add up to {m.num_layers}, {auto}")
    elif 0 in given[1:-1]:
        yield Finding(key, "a chunk between the ends has no layer", f"0 at the ends only, {auto}")


def eight_bits(c: Any) -> Iterator[Finding]:
    """In 8 bits the sides of products are multiples of what the recipe needs, and some layer multiplies so."""
    m, p = c.model, c.parallel
    if c.train.precision != "fp8":
        return
    if c.fp8.bf16_first + c.fp8.bf16_last >= m.num_layers:
        found = f"the first {c.fp8.bf16_first} and last {c.fp8.bf16_last} of {m.num_layers} layers leave none in fp8"
        yield Finding("fp8.bf16_first", found, "bf16_first = 0 and bf16_last = 0, or train.precision = bf16")
    unit, head = RECIPES[c.fp8.recipe].facts["multiple"], m.head_dim
    joined, columns = (m.num_heads + 2 * m.num_kv_heads) * head, "columns of q, k and v on a rank"
    if RECIPES[c.fp8.recipe].facts["grain"] == "block":  # none of which may lie in two of them
        joined, columns = m.num_kv_heads * head, "columns of k on a rank"
    for key, whole, ranks, what in (
        ("model.hidden_size", m.hidden_size, 1, "hidden_size"),
        ("model.num_heads", m.num_heads * head, p.tp, "columns of the heads on a rank"),
        ("model.num_kv_heads", joined, p.tp, columns),
        ("model.ffn_size", m.ffn_size, p.tp, "columns of the MLP on a rank"),
        ("model.seq_length", m.seq_length * c.batch.micro, 1, "tokens in a micro-batch"),
    ):
        if whole // ranks % unit:
            found = f"{whole // ranks} {what}: the fp8 recipe {c.fp8.recipe} multiplies multiples of {unit}"
            cut, mend = ("parallel.tp", "fewer ranks") if whole % unit == 0 else (key, "another size")
            yield Finding(cut, found, f"{mend}, or another fp8.recipe")


def schedule(c: Any) -> Iterator[Finding]:
    """The schedule runs as many chunks as there are."""
    p = c.parallel
    if p.schedule and p.vpp > 1 and not SCHEDULES[p.schedule].facts["chunks"]:
        able = [card.name for card in SCHEDULES.cards.values() if card.facts["chunks"]]
        yield Finding(
            "parallel.schedule",
            f"{p.schedule} runs one chunk a stage, but vpp = {p.vpp}",
            f"{' or '.join(able)}, or vpp = 1",
        )


def recompute(c: Any) -> Iterator[Finding]:
    """What is said of how to recompute changes something, and is said once."""
    t = c.train
    if t.recompute_ops is not None and t.recompute != "selective":
        found = f"chooses what selective recomputation computes again, but recompute = {t.recompute}"
        yield Finding("train.recompute_ops", found, "train.recompute = selective, or leave it out")
    elif len(set(t.recompute_ops or ())) < len(t.recompute_ops or ()):
        yield Finding("train.recompute_ops", "names an operation twice", "each once")
    if t.recompute_chunks is not None and t.recompute == "none":
        found = "chooses chunks that recompute, but recompute = none"
        yield Finding("train.recompute_chunks", found, "train.recompute = selective or full, or leave it out")


def recompute_chunks(c: Any) -> Iterator[Finding]:
    """The chunks that recompute are there."""
    missing = sorted(set(c.train.recompute_chunks or ()) - set(range(c.parallel.vpp)))
    if missing:
        last = c.parallel.vpp - 1
        yield Finding(
            "train.recompute_chunks",
            f"with vpp = {c.parallel.vpp} there is no chunk {_listed(missing)}",
            f"chunks 0 to {last}" if last else "chunk 0, or leave it out",
        )
    elif len(set(c.train.recompute_chunks or ())) < len(c.train.recompute_chunks or ()):
        yield Finding("train.recompute_chunks", "names a chunk twice", "each once")


def batch(c: Any) -> Iterator[Finding]:
    """The global batch is whole micro-batches on every data-parallel rank."""
    dp = c.parallel.dp if isinstance(c.parallel.dp, int) else 1
    unit = c.batch.micro * dp
    if c.batch.total % unit:
        near = sorted({max(unit, c.batch.total // unit * unit), (c.batch.total // unit + 1) * unit})
        yield Finding(
            "batch.global",
            f"{c.batch.total} is not divisible by micro x dp = {c.batch.micro} x {dp}",
            f"{' or '.join(map(str, near))}",
        )


def learning_rate(c: Any) -> Iterator[Finding]:
    """The learning rate falls, within the steps there are."""
    o = c.optimizer
    if o.min_lr > o.lr:
        yield Finding("optimizer.min_lr", f"{o.min_lr:g} is more than lr = {o.lr:g}", f"at most {o.lr:g}")
    if o.warmup_steps >= c.train.steps:
        yield Finding(
            "optimizer.warmup_steps",
            f"{o.warmup_steps} of train.steps = {c.train.steps}",
            f"fewer than {c.train.steps}",
        )
    elif o.decay == "wsd" and (o.decay_steps or 0) > c.train.steps - o.warmup_steps:
        most = c.train.steps - o.warmup_steps
        yield Finding("optimizer.decay_steps", f"{o.decay_steps} do not fit after the warm-up", f"at most {most}")


def backends(c: Any) -> Iterator[Finding]:
    """A backend that is asked for has what the model, its numbers and its layout need of it."""
    recipe = c.fp8.recipe if c.train.precision == "fp8" else None
    number_format = PRECISIONS[c.train.precision].facts["compute"]
    for operation, registry in BACKENDS.items():
        asked = getattr(c.backends, operation)
        need = Need.of(operation, c.model, number_format, c.optimizer.name, c.parallel.tp, recipe)
        if asked != AUTO and (lacking := lacks(registry[asked], need)):
            yield Finding(f"backends.{operation}", f"{asked} {lacking}", "auto, or another backend")


def timeouts(c: Any) -> Iterator[Finding]:
    """Ranks wait for the longest that another may rightly take."""
    start, patience = c.launch.start_timeout_s, c.checkpoint.patience_s
    if start < c.launch.timeout_s:
        found = f"{start} s is less than launch.timeout_s = {c.launch.timeout_s}"
        yield Finding("launch.start_timeout_s", found, f"{c.launch.timeout_s} or more")
    if c.checkpoint.every and start <= patience:
        found = f"after {start} s ranks give up on one whose storage fails for checkpoint.patience_s = {patience}"
        yield Finding("launch.start_timeout_s", found, f"more than {patience}")


def thread_blocks(c: Any) -> Iterator[Finding]:
    """The fewest are no more than the most."""
    for key in ("tp_ctas", "dp_ctas", "pp_ctas", "world_ctas"):
        ctas = getattr(c.nccl, key)
        if isinstance(ctas, list) and ctas[0] > ctas[1]:
            yield Finding(f"nccl.{key}", f"at least {ctas[0]} and at most {ctas[1]}", f"[{ctas[1]}, {ctas[0]}]")


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("model",), heads),
    (("model",), window),
    (("model", "parallel"), tensor_parallel),
    (("model", "parallel"), pipeline),
    (("model", "parallel", "batch", "train", "fp8"), eight_bits),
    (("parallel",), schedule),
    (("train",), recompute),
    (("parallel", "train"), recompute_chunks),
    (("parallel", "batch"), batch),
    (("train", "optimizer"), learning_rate),
    (("model", "parallel", "train", "fp8", "optimizer", "backends"), backends),
    *stored.RULES,
    (("launch", "checkpoint"), timeouts),
    (("nccl",), thread_blocks),
)
"""Every rule, with the sections that it reads: it runs when these are tables, whatever else is wrong."""


def world_findings(c: RunConfig, world: int) -> Iterator[Finding]:
    """What does not fit when the job has `world` processes."""
    p, replica = c.parallel, replicas_of(c.parallel)
    shape = f"tp {p.tp} x cp {p.cp} x pp {p.pp}"
    whole, uneven = divmod(c.batch.total, c.batch.micro)
    if isinstance(p.dp, int):
        if replica * p.dp != world:
            divides = world % replica == 0 and (uneven or whole % (world // replica) == 0)
            mend = f"dp = {world // replica}" if divides else f"start {replica * p.dp} processes"
            yield Finding(
                "parallel.dp", f"{shape} x dp {p.dp} = {replica * p.dp}, but there are {world} processes", mend
            )
        return
    if world % replica:
        replicas = around(range(1, world + 1) if uneven else divisors(whole), world / replica)
        yield Finding(
            "parallel.tp",
            f"{world} {'processes are' if world > 1 else 'process is'} not a multiple of {shape} = {replica}",
            f"start {' or '.join(str(replica * dp) for dp in replicas)}",
        )
        return
    if not uneven:  # otherwise the rule has spoken
        yield from batch(c.resolve(world))
