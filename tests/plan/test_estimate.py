"""Estimates of whole steps: causes add up, and what ought to be faster is."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.config.explain import load
from megascale.plan import profiles
from megascale.plan.estimate import Model, estimate, largest_of, skeleton, step_time
from megascale.plan.flops import block_weights
from megascale.plan.links import group_route
from megascale.plan.params import parameter_count

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


def test_a_stack_that_stops_for_its_messages_takes_longer() -> None:
    """Each rank sends as many as it has forwards and backwards of chunks that have a neighbour."""
    shown = STACK.model_copy(update={"hides": STACK.hides.model_copy(update={"pp": False})})
    stops = shown.model_copy(update={"attained": shown.attained.model_copy(update={"message_s": 1e-3})})
    base, found = of(stack=shown), of(stack=stops)
    config = load(CONFIG, ["batch.global=256"], world=512)
    messages = 2 * config.micro_batches * config.parallel.vpp
    assert found.step_s - base.step_s == pytest.approx(messages * 1e-3, rel=0.3)
    assert found.causes["pp"] - base.causes["pp"] == pytest.approx(found.step_s - base.step_s)
    hidden = STACK.model_copy(update={"attained": STACK.attained.model_copy(update={"message_s": 1e-3})})
    assert of(stack=hidden).step_s == of().step_s


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


@pytest.mark.parametrize(("size", "moved"), [(0, 2 + 2 * 4), (2, 3 * 2 * 31 / 32)])
def test_a_stack_may_add_gradients_up_in_a_pass_of_its_own(size: int, moved: float) -> None:
    """Of one's own it reads both and writes the sum, of each micro-batch but the first; or of a wider buffer."""
    apart = STACK.model_copy(update={"adds_apart": True, "gradient_bytes": size})
    within = STACK.model_copy(update={"gradient_bytes": size})
    found, base = (of("parallel.vpp=1", stack=stack).causes["elementwise"] for stack in (apart, within))
    config = load(CONFIG, ["batch.global=256", "parallel.vpp=1"], world=512)
    assert config.micro_batches == 32
    weights = (sum(block_weights(config.model).values()) * 96 + 12288 * 64_000) / 64
    rate = HARDWARE.device.bandwidth * HARDWARE.attained.memory / STACK.attained.slowdown
    assert found - base == pytest.approx(32 * moved * weights / rate, rel=0.01)


@pytest.mark.parametrize(("gpus", "owners"), [(8, 8), (1024, 4 * 12 + 4)])
def test_a_stack_may_broadcast_what_its_ranks_updated(gpus: int, owners: int) -> None:
    """One rank after another, as many as there are, or as there are tensors."""
    keys = ["model.num_layers=4", "parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.sp=false"]
    config = load(CONFIG, ["batch.global=1024", *keys], world=gpus)
    broadcasts = STACK.model_copy(update={"broadcasts": True})
    model = Model(config, HARDWARE, broadcasts, skeleton(config, broadcasts))
    route = group_route(HARDWARE, gpus, 1, gpus)
    expected = route.broadcasts(2 * sum(model.numbers[0, 0]), gpus, owners)
    assert model.times().gather == {(0, 0): pytest.approx(expected)}
    assert estimate(config, HARDWARE, broadcasts).step_s > estimate(config, HARDWARE, STACK).step_s


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
    blocking = of(recomputed, stack=quick.model_copy(update={"launch_blocking": True}))
    assert blocking.causes["host"] == pytest.approx(layers * passes * 1e-6)


def test_weights_are_gathered_no_faster_than_a_stack_does_it() -> None:
    keys = ["parallel.tp=1", "parallel.sp=false", "parallel.pp=1", "parallel.vpp=1", "train.recompute=full"]
    stack = profiles.stack("llm-foundry").model_copy(update={"hides": STACK.hides.model_copy(update={"dp": False})})
    slow, weights = stack.model_copy(update={"gather_rate": 1e9}), parameter_count(load(CONFIG, world=512).model)

    def bytes_shown(stack: Any) -> float:  # for each number
        return of(*keys, gpus=256, stack=stack).causes["dp"] * 1e9 / weights

    assert bytes_shown(slow) == pytest.approx(2 + 2 + 2, rel=0.01)
    assert bytes_shown(slow.model_copy(update={"gathers_again": True})) == pytest.approx(2 + 2 + 2 + 2, rel=0.01)
    assert bytes_shown(stack) < 0.1


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_a_blocks_result_is_not_computed_again(block: str) -> None:
    """By this trainer: of the products of a forward, those that form it."""
    keys = [f"model.block={block}", "train.recompute=full"]
    early, whole = of(*keys), of(*keys, stack=STACK.model_copy(update={"stops_early": False}))
    model, none = load(CONFIG, keys[:1]).model, of(keys[0])
    weights = block_weights(model)
    last = sum(weights[name] for name in (("out", "down") if block == "parallel" else ("down",)))
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


def test_stragglers_grow_with_the_job() -> None:
    spread = HARDWARE.model_copy(update={"spread": 0.02})
    shares = [of(gpus=gpus, hardware=spread).causes["stragglers"] / of(gpus=gpus).causes["gemm"] for gpus in (64, 512)]
    assert 0.02 * 2 < shares[0] < shares[1] < 0.02 * 4
    assert largest_of(1) == 0.0
    assert largest_of(2) == pytest.approx(0.5642, rel=0.07)  # 1 / sqrt(pi): where the formula is worst
    assert largest_of(1000) == pytest.approx(3.2414, rel=0.01)


def test_a_step_time_is_that_of_the_estimate() -> None:
    config = load(CONFIG, ["batch.global=256"], world=512)
    assert step_time(config, HARDWARE, STACK) == estimate(config, HARDWARE, STACK).step_s
