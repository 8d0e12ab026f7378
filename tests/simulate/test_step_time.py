"""Estimates of whole steps: causes add up, and what ought to be faster is."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.config.explain import load
from megascale.layout.blocks import block as description
from megascale.layout.blocks import linears
from megascale.simulate import profiles
from megascale.simulate.step_time import StepParts, estimate, with_spans

CONFIG = "configs/gpu/megascale-175b.toml"
HARDWARE = profiles.hardware("a100-80g-roce")
STACK = profiles.stack("megascale")


def of(*overrides: str, gpus: int = 512, stack: Any = STACK, hardware: Any = HARDWARE) -> Any:
    return estimate(load(CONFIG, ["batch.global=256", *overrides], world=gpus), hardware, stack)


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
@pytest.mark.parametrize("stack", ["megascale", "megatron-2021", "llm-foundry"])
def test_causes_are_the_step(overrides: list[str], stack: str) -> None:
    found = of(*overrides, stack=profiles.stack(stack))
    assert sum(found.causes.values()) == pytest.approx(found.step_s)
    assert min(found.causes.values()) >= 0
    assert 0 < found.mfu_causal < found.mfu_full < 1
    assert found.tokens_per_s == pytest.approx(256 * 2048 / found.step_s)


def test_what_saves_time_saves_time() -> None:
    base = of().step_s
    for slower in (["overlap.tp=false"], ["overlap.dp=false"], ["train.recompute=full"], ["parallel.vpp=1"]):
        assert of(*slower).step_s > base, slower
    assert of("model.block=parallel").step_s < base
    assert of("model.window=256").step_s < base
    assert of(stack=profiles.stack("megatron-2023")).step_s > base


def test_scores_pass_through_memory_where_no_kernel_keeps_them() -> None:
    """Nine times two bytes and a mask in a forward, eleven in a backward, beside six products."""
    unfused = STACK.model_copy(update={"attention": "unfused"})
    found, config = of(stack=unfused), load(CONFIG, ["batch.global=256"], world=512)
    m, rate = config.model, HARDWARE.device.bandwidth * HARDWARE.attained.memory
    scores = config.batch.micro * m.num_heads // 8 * m.seq_length**2 * m.num_layers // 8 * config.micro_batches
    moved = scores * (9 + 11) / rate * STACK.attained.slowdown
    products = scores * 6 * 2 * m.head_dim / (312e12 * HARDWARE.attained.gemm)
    assert moved + products < found.causes["attention"] < moved + 4 * products  # whose sums of 128 terms are short
    passes = unfused.model_copy(update={"attained": STACK.attained.model_copy(update={"passes": 9.0})})
    assert of(stack=passes).causes["attention"] == found.causes["attention"]


@pytest.mark.parametrize(("recompute", "passes"), [("none", 3), ("full", 4)])
def test_a_device_waits_for_a_host_that_launches_slower_than_it_works(recompute: str, passes: int) -> None:
    """What a host takes for a layer's forward it takes again where that is formed again, and twice for its backward."""
    recomputed, layers = f"train.recompute={recompute}", 12 * 32  # of a rank in a step
    base = of(recomputed)
    slow, quick = (STACK.model_copy(update={"host_s": seconds}) for seconds in (1.0, 1e-6))
    assert of(recomputed, stack=quick).step_s == base.step_s
    found = of(recomputed, stack=slow)
    total = sum(found.causes[cause] for cause in ("gemm", "attention", "elementwise", "recompute", "tp", "host"))
    assert total == pytest.approx(layers * passes, rel=0.01)


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_a_blocks_result_is_not_computed_again(block: str) -> None:
    """By this trainer: of the products of a forward, those that form it."""
    keys = [f"model.block={block}", "train.recompute=full"]
    early, whole = of(*keys), of(*keys, stack=STACK.model_copy(update={"stops_early": False}))
    model, none = load(CONFIG, keys[:1]).model, of(keys[0])
    weights = {layer.name: layer.elements for layer in linears(description(model, 0))}
    last = sum(weights[name] for name in (("attention.out", "mlp.down") if block == "parallel" else ("mlp.down",)))
    share = last / (sum(weights.values()) + model.hidden_size * model.vocab_size / model.num_layers)
    assert early.causes["gemm"] == none.causes["gemm"] and none.causes["recompute"] == 0
    saved = whole.causes["recompute"] - early.causes["recompute"]
    assert saved == pytest.approx(share * none.causes["gemm"] / 3, rel=0.05)
    assert none.exposed["tp"] < early.exposed["tp"] < whole.exposed["tp"]


def test_each_operation_that_is_computed_again_takes_time() -> None:
    def again(*names: str) -> float:
        ops = ",".join(f'"{name}"' for name in names)
        return of("train.recompute=selective", f"train.recompute_ops=[{ops}]").causes["recompute"]

    each = [again(name) for name in ("attention", "norm", "activation")]
    assert min(each) > 0
    assert again("attention", "norm", "activation") == pytest.approx(sum(each))


def test_tp_hides_behind_products_in_8_bits_only_as_long_as_they_take() -> None:
    slow = profiles.hardware("h100")
    slow = slow.model_copy(update={"node": slow.node.model_copy(update={"bandwidth": 60e9})})
    bf16, fp8 = (of(f"train.precision={precision}", hardware=slow).exposed["tp"] for precision in ("bf16", "fp8"))
    assert fp8 > 1.02 * bf16
    keys = ["train.precision=fp8", "model.block=parallel", "parallel.sp=false"]
    none, full = (of(*keys, f"train.recompute={what}", hardware=slow).exposed["tp"] for what in ("none", "full"))
    assert full == pytest.approx(none)  # what a block ends with is not formed again


def test_fp8_is_faster_where_there_is_fp8() -> None:
    h100, bf16 = profiles.hardware("h100"), ["train.precision=bf16"]
    assert of("train.precision=fp8", hardware=h100).step_s < of(*bf16, hardware=h100).step_s < of().step_s


def test_a_step_and_its_spans_are_those_of_the_estimate() -> None:
    for keys in ([], ["parallel.zero=2"], ["overlap.pp=false", "overlap.dp=false"]):
        config = load(CONFIG, ["batch.global=256", *keys], world=512)
        found = estimate(config, HARDWARE, STACK)
        assert StepParts(config, HARDWARE, STACK).step_s == found.step_s
        played = with_spans(config, HARDWARE, STACK)
        assert played.last == found.pipeline_s == max(span.end for span in played.spans)


def test_large_jobs_lose_to_their_size() -> None:
    """The same share for every doubling beyond 256 devices, as a cause of its own."""
    lossless, lossy = (
        STACK.model_copy(update={"attained": STACK.attained.model_copy(update={"scale_loss": loss})})
        for loss in (0.0, 0.02)
    )
    for gpus, doublings in ((64, 0), (256, 0), (512, 1), (2048, 3)):
        base, found = (of("batch.global=1024", gpus=gpus, stack=stack) for stack in (lossless, lossy))
        assert found.step_s == pytest.approx(base.step_s * (1 + 0.02 * doublings))
        assert found.causes["scale"] == pytest.approx(found.step_s - base.step_s)
        assert base.causes["scale"] == 0


def test_gradients_are_reduced_after_each_backward_where_the_stack_does_so() -> None:
    """With zero = 2 alone: other stacks keep whole gradients until the last micro-batch."""
    once = STACK.model_copy(update={"reduces_each": False})
    for zero in (1, 2):
        found = [of(f"parallel.zero={zero}", stack=stack).step_s for stack in (STACK, once)]
        assert (found[0] > found[1]) == (zero == 2)
    config = load(CONFIG, ["batch.global=256", "parallel.zero=2"], world=512)
    assert StepParts(config, HARDWARE, STACK).pipeline.reduces_each


def test_fp8_recipes_differ_in_their_casts_and_rates() -> None:
    h100 = profiles.hardware("h100")
    tensor, delayed, row = (
        of("train.precision=fp8", f"fp8.recipe={name}", hardware=h100) for name in ("tensorwise", "delayed", "rowwise")
    )
    assert tensor.causes["gemm"] == delayed.causes["gemm"] < row.causes["gemm"]
    assert delayed.causes["elementwise"] < tensor.causes["elementwise"] == row.causes["elementwise"]


def test_zero_3_exposes_a_layer_of_what_it_gathers() -> None:
    """All where nothing hides it: in a forward and a backward the weights, and the gradients of 2 bytes."""
    keys = ["parallel.tp=1", "parallel.sp=false", "parallel.pp=1", "parallel.vpp=1", "train.recompute=full"]
    stack = profiles.stack("llm-foundry")
    shown = stack.model_copy(update={"hides": STACK.hides.model_copy(update={"dp": False})})
    config = load(CONFIG, ["batch.global=256", *keys], world=256)
    parts = StepParts(config, HARDWARE, shown)
    travel = 2 * parts.dp.gather(parts.buckets[0, 0]) + parts.dp.reduce(parts.buckets[0, 0])
    assert parts.dp.gradient == parts.dp.weight == 2
    assert of(*keys, gpus=256, stack=shown).causes["dp"] == pytest.approx(travel)
    hidden = of(*keys, gpus=256, stack=stack).causes["dp"]
    assert (1 - HARDWARE.attained.hiding) * travel == pytest.approx(hidden)
