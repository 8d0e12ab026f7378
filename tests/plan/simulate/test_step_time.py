"""Estimates of steps: causes add up, and faster settings are faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megascale.config.loading import load_config
from megascale.layout.blocks import block_spec as description
from megascale.layout.blocks import linears
from megascale.layout.parameters import parameter_count
from megascale.plan.simulate import profiles
from megascale.plan.simulate.step_time import StepParts
from megascale.record.events import COMPUTE
from megascale.schedule.ir import Kind
from tests.marks import only_quick

CONFIG = "configs/gpu/megascale-175b.toml"
HARDWARE = profiles.hardware("a100-80g-roce")
STACK = profiles.stack("megascale")


def of(*overrides: str, gpus: int = 512, stack: Any = STACK, hardware: Any = HARDWARE) -> Any:
    return StepParts(load_config(CONFIG, ["batch.global=256", *overrides], world_size=gpus), hardware, stack).estimate


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["parallel.sp=false"],
        ["parallel.zero=0"],
        ["parallel.zero=2"],
        ["parallel.vpp=1"],
        ["parallel.pp=1", "parallel.vpp=1"],
        ["train.recompute=full"],
        ["train.recompute=selective", "model.window=512"],
        ["model.block=parallel", "overlap.tp=false", "overlap.pp=false", "overlap.dp=false"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("stack", only_quick(["megascale", "megatron-2021", "llm-foundry"], "megascale"))
def test_causes_add_up_to_the_step(overrides: list[str], stack: str) -> None:
    step = of(*overrides, stack=profiles.stack(stack))
    assert sum(step.causes.values()) == pytest.approx(step.step_s)
    assert min(step.causes.values()) >= 0
    assert 0 < step.mfu_causal < step.mfu_full < 1
    assert step.tokens_per_s == pytest.approx(256 * 2048 / step.step_s)


def test_settings_that_save_time() -> None:
    base = of().step_s
    for slower in (["overlap.tp=false"], ["overlap.dp=false"], ["train.recompute=full"], ["parallel.vpp=1"]):
        assert of(*slower).step_s > base, slower
    assert of("model.block=parallel").step_s < base
    assert of("model.window=256").step_s < base
    assert of(stack=profiles.stack("megatron-2023")).step_s > base


def test_a_partial_pipeline_counts_what_it_computes() -> None:
    """With larger chunks in the middle, which half skip, ranks have two thirds of the work."""
    keys = ["parallel.pp=4", "parallel.vpp=1", "parallel.tp=8", "model.num_layers=48"]
    whole = of(*keys, "parallel.layers_per_chunk=[12,12,12,12]")
    partial = of(*keys, "parallel.layers_per_chunk=[8,16,16,8]", "parallel.skip_ratio=0.5")
    assert sum(partial.causes.values()) == pytest.approx(partial.step_s)
    for cause in ("gemm", "attention", "tp"):
        assert partial.causes[cause] == pytest.approx(2 / 3 * whole.causes[cause], rel=0.1)
    flops, all_flops = (step.mfu_full * step.step_s for step in (partial, whole))
    assert flops == pytest.approx(2 / 3 * all_flops, rel=0.02)  # and the head
    assert partial.step_s < 0.8 * whole.step_s


def test_pairs_hide_the_exchange_of_experts() -> None:
    """Up to the slowdown of compute, in the steady phase of a pipeline: most of many micro-batches."""

    def planned(schedule: str) -> Any:
        keys = ["parallel.pp=4", "parallel.vpp=2", "parallel.tp=1", "parallel.ep=8", "parallel.dp=8", "batch.micro=1"]
        keys += ["parallel.sp=false", "parallel.cp=1", "batch.global=512", f"parallel.schedule={schedule}"]
        config = load_config("configs/gpu/mixtral-8x22b.toml", keys, world_size=32)
        return StepParts(config, profiles.hardware("h100-800g"), STACK).estimate

    whole, paired = planned("interleaved_1f1b"), planned("combined_1f1b")
    assert whole.causes["ep"] > 0.02 * whole.step_s
    assert 0 < paired.causes["ep"] < 0.5 * whole.causes["ep"]
    assert paired.step_s < whole.step_s - 0.2 * whole.causes["ep"]
    assert paired.causes["bubble"] == pytest.approx(whole.causes["bubble"], rel=0.1)
    assert planned("dualpipev").step_s < planned("zb_v").step_s


def test_domino_hides_collectives_and_splits_gemms() -> None:
    """Across hosts pieces have no overlap, and small GEMMs take longer for their work."""
    layout = ["parallel.tp=16", "parallel.pp=4", "batch.micro=2"]
    whole, domino = of(*layout), of(*layout, "overlap.tp=domino")
    sent = of(*layout, "overlap.tp=false").causes["tp"]
    assert (1 - HARDWARE.attained.overlap) * sent <= domino.causes["tp"] < whole.causes["tp"] < sent
    assert domino.causes["gemm"] >= whole.causes["gemm"]


def test_recomputed_chunks_wait_for_no_w() -> None:
    """As in training: the drain is not filled with weights' gradients."""
    keys = ["batch.global=256", "parallel.vpp=1", "parallel.schedule=zb_h1", "train.recompute=full"]
    parts = StepParts(load_config(CONFIG, keys, world_size=512), HARDWARE, STACK)
    assert parts.pipeline.joined == (0,)
    spans = parts.pipeline.simulate(parts.times, parts.overlaps, spans=True).spans
    for rank in range(parts.config.parallel.pp):
        order = [span.action for span in spans if span.rank == rank and span.row == COMPUTE]
        assert all(order[at + 1] == each._replace(kind=Kind.W) for at, each in enumerate(order) if each.kind is Kind.I)
    assert parts.pipeline_s(parts.times) > replace(parts.pipeline, joined=()).simulate(parts.times, parts.overlaps).last


def test_unfused_scores_pass_through_memory() -> None:
    """Four passes of two bytes and a mask in forward, five in backward, beside six GEMMs."""
    unfused = STACK.model_copy(update={"attention": "unfused"})
    attention, config = of(stack=unfused).causes["attention"], load_config(CONFIG, ["batch.global=256"], world_size=512)
    m, rate = config.model, HARDWARE.device.bandwidth * HARDWARE.attained.memory
    scores = config.batch.micro * m.num_heads // 8 * m.seq_length**2 * m.num_layers // 8 * config.num_microbatches
    moved = scores * (9 + 11) / rate * STACK.attained.slowdown
    gemms = scores * 6 * 2 * m.head_dim / (312e12 * HARDWARE.attained.gemm)
    assert moved + gemms < attention < moved + 4 * gemms  # k = 128 is short
    passes = unfused.model_copy(update={"attained": STACK.attained.model_copy(update={"passes": 9.0})})
    assert of(stack=passes).causes["attention"] == attention


@pytest.mark.parametrize(("recompute", "passes"), [("none", 3), ("full", 4)])
def test_the_device_waits_for_a_slow_host(recompute: str, passes: int) -> None:
    """The host takes `host_s` for a layer's forward, as long for a recomputed one, and twice as long for backward."""
    recomputed, layers = f"train.recompute={recompute}", 12 * 32  # layers of a rank x micro-batches
    base = of(recomputed)
    slow, quick = (STACK.model_copy(update={"host_s": seconds}) for seconds in (1.0, 1e-6))
    assert of(recomputed, stack=quick).step_s == base.step_s
    waiting = of(recomputed, stack=slow)
    total = sum(waiting.causes[cause] for cause in ("gemm", "attention", "elementwise", "recompute", "tp", "host"))
    assert total == pytest.approx(layers * passes, rel=0.01)


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_the_last_gemm_of_a_block_is_not_recomputed(block: str) -> None:
    """This trainer leaves out the GEMMs of the block's result."""
    keys = [f"model.block={block}", "train.recompute=full"]
    early, full = of(*keys), of(*keys, stack=STACK.model_copy(update={"stops_early": False}))
    model, none = load_config(CONFIG, keys[:1]).model, of(keys[0])
    weights = {layer.name: layer.weight_numel for layer in linears(description(model, 0))}
    last = sum(weights[name] for name in (("attention.out", "mlp.down") if block == "parallel" else ("mlp.down",)))
    share = last / (sum(weights.values()) + model.hidden_size * model.vocab_size / model.num_layers)
    assert early.causes["gemm"] == none.causes["gemm"] and none.causes["recompute"] == 0
    saved = full.causes["recompute"] - early.causes["recompute"]
    assert saved == pytest.approx(share * none.causes["gemm"] / 3, rel=0.05)
    assert none.causes["tp"] < early.causes["tp"] < full.causes["tp"]


def test_recomputed_operations_add_up() -> None:
    def recomputed(*names: str) -> float:
        ops = ",".join(f'"{name}"' for name in names)
        return of("train.recompute=selective", f"train.recompute_ops=[{ops}]").causes["recompute"]

    times = [recomputed(name) for name in ("attention", "norm", "activation")]
    assert min(times) > 0
    assert recomputed("attention", "norm", "activation") == pytest.approx(sum(times))


def test_fp8_gemms_hide_less_of_tp() -> None:
    slow = profiles.hardware("h100")
    slow = slow.model_copy(update={"node": slow.node.model_copy(update={"bandwidth": 60e9})})
    bf16, fp8 = (of(f"train.precision={precision}", hardware=slow).causes["tp"] for precision in ("bf16", "fp8"))
    assert fp8 > 1.02 * bf16
    keys = ["train.precision=fp8", "model.block=parallel", "parallel.sp=false"]
    none, full = (of(*keys, f"train.recompute={mode}", hardware=slow).causes["tp"] for mode in ("none", "full"))
    assert full == pytest.approx(none)  # the last reduction of a block is not repeated


def test_fp8_is_faster_than_bf16() -> None:
    h100, bf16 = profiles.hardware("h100"), ["train.precision=bf16"]
    assert of("train.precision=fp8", hardware=h100).step_s < of(*bf16, hardware=h100).step_s < of().step_s


def test_step_and_spans_agree_with_the_estimate() -> None:
    for keys in ([], ["parallel.zero=2"], ["overlap.pp=false", "overlap.dp=false"]):
        config = load_config(CONFIG, ["batch.global=64", *keys], world_size=512)
        parts = StepParts(config, HARDWARE, STACK)
        simulate = parts.pipeline.simulate(parts.times, parts.overlaps, spans=True)
        assert parts.step_s == parts.estimate.step_s
        assert simulate.last == parts.pipeline_s(parts.times) == max(span.end for span in simulate.spans)


def test_large_jobs_have_a_loss_with_scale() -> None:
    """The loss is an equal share for every doubling beyond 256 devices, with a cause of its own."""
    lossless, lossy = (
        STACK.model_copy(update={"attained": STACK.attained.model_copy(update={"scale_loss": loss})})
        for loss in (0.0, 0.02)
    )
    for gpus, doublings in ((64, 0), (256, 0), (512, 1), (2048, 3)):
        base, lossy_step = (of(gpus=gpus, stack=stack) for stack in (lossless, lossy))
        assert lossy_step.step_s == pytest.approx(base.step_s * (1 + 0.02 * doublings))
        assert lossy_step.causes["scale"] == pytest.approx(lossy_step.step_s - base.step_s)
        assert base.causes["scale"] == 0


def test_zero_2_reduces_after_every_backward_if_the_stack_does() -> None:
    """Stacks without `reduces_each` keep full gradients until the last micro-batch."""
    once = STACK.model_copy(update={"reduces_each": False})
    for zero in (1, 2):
        every, last = (of(f"parallel.zero={zero}", stack=stack).step_s for stack in (STACK, once))
        assert (every > last) == (zero == 2)
    config = load_config(CONFIG, ["batch.global=256", "parallel.zero=2"], world_size=512)
    assert StepParts(config, HARDWARE, STACK).pipeline.reduces_each


def test_fp8_recipes_differ_in_quantization_and_rates() -> None:
    h100 = profiles.hardware("h100")
    tensor, delayed, row = (
        of("train.precision=fp8", f"fp8.recipe={name}", hardware=h100) for name in ("tensorwise", "delayed", "rowwise")
    )
    assert tensor.causes["gemm"] == delayed.causes["gemm"] < row.causes["gemm"]
    assert delayed.causes["elementwise"] < tensor.causes["elementwise"] < row.causes["elementwise"]


FLAT = ["parallel.tp=1", "parallel.sp=false", "parallel.pp=1", "parallel.vpp=1", "train.recompute=full"]


def test_zero_3_exposes_the_collectives_of_units() -> None:
    """Without overlap all is exposed: weights in forward and backward, of the head, with the embedding that is tied to
    it, once, and gradients of 2 bytes.
    """
    keys, stack = [*FLAT, "parallel.zero=3"], profiles.stack("llm-foundry")
    shown = stack.model_copy(update={"overlaps": STACK.overlaps.model_copy(update={"dp": False})})
    parts = StepParts(load_config(CONFIG, ["batch.global=256", *keys], world_size=256), HARDWARE, shown)
    gathers = [parts.dp.gather(module) for module in parts.modules[0, 0]]
    sent = 2 * sum(gathers) - gathers[-1] + gathers[0] + parts.dp.reduce(parts.buckets[0, 0])
    assert parts.dp.gradient == 2 and len(gathers) == parts.config.model.num_layers + 2
    assert all(nbytes == 2 * numel for _, numel, nbytes in parts.buckets[0, 0])
    assert of(*keys, gpus=256, stack=shown).causes["dp"] == pytest.approx(sent)
    hidden = of(*keys, gpus=256, stack=stack).causes["dp"]
    ends = parts.dp.reduce(parts.modules[0, 0][0]) + sum(gathers[:2])
    assert (1 - HARDWARE.attained.overlap) * (sent - gathers[0]) < hidden
    assert hidden < (1 - HARDWARE.attained.overlap) * sent + ends + parts.dp.reduce(parts.modules[0, 0][1])


@pytest.mark.parametrize("stack", ["megascale", "megatron-2021"])
@pytest.mark.parametrize("pipelined", [False, True], ids=["flat", "pipelined"])
def test_weights_that_are_gathered_more_often_take_longer(pipelined: bool, stack: str) -> None:
    ways = ["keep", "microbatch", "forward"] if pipelined else ["keep", "forward"]
    keys = ["parallel.pp=8", "parallel.vpp=6", "parallel.tp=1", "parallel.sp=false"] if pipelined else FLAT
    steps = [of(*keys, "parallel.zero=2", stack=profiles.stack(stack), gpus=256)]
    steps += [
        of(*keys, "parallel.zero=3", f"parallel.reshard={way}", stack=profiles.stack(stack), gpus=256) for way in ways
    ]
    assert steps[0].step_s <= steps[1].step_s
    assert sorted(step.step_s for step in steps[1:]) == [step.step_s for step in steps[1:]]
    for step in steps:
        assert sum(step.causes.values()) == pytest.approx(step.step_s) and min(step.causes.values()) >= 0


def test_shards_in_a_node_are_gathered_over_its_links() -> None:
    """The network carries the sum over copies, an eighth of the gradients of each of 8 ranks, once a step."""
    keys = ["parallel.tp=1", "parallel.sp=false", "parallel.pp=1", "parallel.vpp=1", "parallel.zero=3"]
    keys += ["model.num_layers=8", "batch.micro=1", "batch.global=512"]
    load = [load_config(CONFIG, [*keys, *more], world_size=128) for more in ([], ["parallel.dp_shard=8"])]
    whole, hybrid = (StepParts(config, HARDWARE, STACK) for config in load)
    assert whole.dp.network and hybrid.dp.network and not hybrid.dp.groups["cp", "dp"][0].network
    buckets = hybrid.buckets[0, 0]
    assert hybrid.dp.gather(buckets) < whole.dp.gather(buckets) and whole.dp.sum_copies(buckets) == 0
    route, copies = hybrid.dp.copies
    assert copies == 16 and route.bandwidth == pytest.approx(whole.dp.groups["cp", "dp"][0].bandwidth / 8)
    moved = 2 * 15 / 16 * 4 * sum(numel for _, numel, _ in buckets) / 8 / route.bandwidth
    assert hybrid.dp.sum_copies(buckets) == pytest.approx(moved, rel=0.1)
    assert hybrid.step_s < whole.step_s


def test_fp8_weights_are_gathered_in_half_the_time() -> None:
    """But for the first and the last layer, embedding and head."""
    parts = StepParts(load_config(CONFIG, [*FLAT, "parallel.zero=3", "train.precision=fp8"], 256), HARDWARE, STACK)
    gathers = [parts.dp.gather(module) for module in parts.modules[0, 0]]
    assert all(gathers[1] == gathers[-2] > 1.7 * coded for coded in gathers[2:-2])


def test_gathers_hide_from_a_number_of_tokens_on() -> None:
    """Attained FLOP/s over bytes/s, for 6 FLOPs a token and 8 bytes a weight: two gathers of 2, a reduction of 4."""
    keys = [*FLAT, "train.recompute=none", "parallel.zero=3"]
    parts = StepParts(load_config(CONFIG, ["batch.global=256", *keys], world_size=256), HARDWARE, STACK)
    pair, (route, _) = parts.pairs[0, 0], next(iter(parts.dp.groups.values()))
    rate = 6 * parameter_count(parts.config.model) * 2048 / (pair.total - pair.forward.dp - pair.backward.dp)
    assert parts.hiding_tokens == pytest.approx(8 / 6 * rate / route.bandwidth, rel=0.05)  # and latency
