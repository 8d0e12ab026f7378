"""Times of blocks follow from their descriptions, for any kind of block."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale.catalog.layers import BLOCKS
from megascale.config.loading import load_config
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.registry import Card
from megascale.layout.blocks import BlockSpec, block_spec, serial_block
from megascale.layout.parts.elementwise import NormSpec, ResidualAdd
from megascale.layout.parts.linear import RowParallel
from megascale.layout.parts.times import PassTimes
from megascale.layout.recompute_policy import NO_RECOMPUTE, RecomputePolicy
from megascale.plan.simulate import profiles
from megascale.plan.simulate.chunk_time import block_times, chunk_times
from megascale.plan.simulate.gemm_time import HOST_WAIT_S
from megascale.plan.simulate.layer_time import LayerTimes

HARDWARE, STACK = profiles.hardware("h100"), profiles.stack("megascale")
KEYS = ["model.num_layers=8", "parallel.pp=4", "parallel.vpp=1", "batch.global=16"]


def ended(model: ModelConfig, layer: int) -> BlockSpec:
    """A serial block with another norm after both branches."""
    return tuple(
        piece
        for part in serial_block(model, layer)
        for piece in ([NormSpec("after"), part] if part == ResidualAdd() else [part])
    )


@pytest.fixture
def ended_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ended.__globals__, "ended", ended)
    card = Card("ended", "", "nowhere:Block", {"description": f"{__name__}:ended", "operations": ()})
    monkeypatch.setitem(BLOCKS.cards, card.name, card)


def config_of(*keys: str) -> RunConfig:
    return load_config("configs/gpu/megascale-175b.toml", [*KEYS, *keys], world_size=32)


def layers_of(config: RunConfig) -> LayerTimes:
    return LayerTimes.from_config(config, HARDWARE, STACK)


def of(config: RunConfig, recompute: RecomputePolicy = NO_RECOMPUTE, fp8: bool = False) -> PassTimes:
    return block_times(layers_of(config), block_spec(config.model, 0), fp8, recompute)


def test_a_block_is_the_sum_of_its_parts() -> None:
    for kind in BLOCKS.names():
        config = config_of(f"model.block={kind}", "model.window=512")
        layers, described = layers_of(config), block_spec(config.model, 0)
        total = sum((part.seconds(layers, False) for part in described), PassTimes())
        assert of(config) == total
        assert total.forward.total > 0 and total.backward.gemm == pytest.approx(2 * total.forward.gemm, rel=0.1)


def test_a_new_kind_of_block_needs_only_a_description(ended_card: None) -> None:
    serial, third = config_of(), config_of("model.block=ended")
    norm = NormSpec("after").seconds(layers_of(third), False)
    ours, theirs = of(serial), of(third)
    assert theirs.forward.elementwise == pytest.approx(ours.forward.elementwise + 2 * norm.forward.elementwise)
    assert theirs.backward.elementwise == pytest.approx(ours.backward.elementwise + 2 * norm.backward.elementwise)
    assert (theirs.forward.gemm, theirs.forward.tp) == (ours.forward.gemm, ours.forward.tp)
    for place, pair in chunk_times(LayerTimes.from_config(third, HARDWARE, STACK)).items():
        assert (
            pair.forward.elementwise
            > chunk_times(LayerTimes.from_config(serial, HARDWARE, STACK))[place].forward.elementwise
        )


def test_only_norms_before_column_parallel_layers_are_recomputed(ended_card: None) -> None:
    recompute = RecomputePolicy(norm=True)
    recomputed = [of(config_of(f"model.block={kind}"), recompute).backward.recompute for kind in ("serial", "sandwich")]
    norm = NormSpec("any").seconds(layers_of(config_of()), False).forward.elementwise
    assert recomputed == pytest.approx([2 * norm, 2 * norm])


def test_full_recomputation_leaves_out_the_last_linear_layer(ended_card: None) -> None:
    """A sandwich block recomputes also the last linear layer, for the norm after."""
    for kind, left_out in (("serial", True), ("sandwich", False)):
        config = config_of(f"model.block={kind}")
        base, full = of(config), of(config, RecomputePolicy(full=True))
        *_, last = (part for part in block_spec(config.model, 0) if isinstance(part, RowParallel))
        part = last.seconds(layers_of(config), False).forward
        expected = base.forward.total - base.forward.tp - (part.total - part.tp) * left_out
        assert full.backward.recompute == pytest.approx(expected)
        assert full.backward.tp == pytest.approx(base.backward.tp + base.forward.tp - part.tp * left_out)


def test_tiles_repeat_all_but_the_last_gemm_of_the_mlp() -> None:
    """Full recomputation skips the MLP of a serial block, and its tiles repeat no more."""
    config = config_of("overlap.tp=false", "model.block=serial", "model.seq_length=32768")
    tiles = RecomputePolicy(mlp_tiles=4)
    whole, tiled, full = of(config), of(config, tiles), of(config, RecomputePolicy(full=True))
    up, activation = block_spec(config.model, 0)[-4:-2]
    first = sum((part.seconds(layers_of(config), False) for part in (up, activation)), PassTimes()).forward
    assert tiled.backward.recompute == pytest.approx(first.total - first.tp, rel=0.05)
    assert tiled.forward.total == pytest.approx(whole.forward.total, rel=0.05)
    gather = layers_of(config).exchange.gather()  # tiles have more latencies
    assert tiled.backward.tp - whole.backward.tp == pytest.approx(gather, rel=0.2)
    both = of(config, RecomputePolicy(full=True, mlp_tiles=4))
    assert both.backward.recompute == pytest.approx(full.backward.recompute, rel=0.05)


def test_copies_to_host_memory_are_exposed_beyond_a_block() -> None:
    config, full = config_of(), RecomputePolicy(full=True)
    input_bytes = layers_of(config).stream * 2

    def offloaded(bandwidth: float | None) -> PassTimes:
        device = HARDWARE.device.model_copy(update={"host_bandwidth": bandwidth})
        hardware = HARDWARE.model_copy(update={"device": device})
        layers = LayerTimes.from_config(config, hardware, STACK)
        return block_times(layers, block_spec(config.model, 0), False, replace(full, store="host"))

    kept = of(config, full)
    assert offloaded(64e9) == offloaded(None) == kept  # hidden, or unknown
    slow = offloaded(1e9)
    copied = input_bytes / (1e9 * HARDWARE.attained.link)
    assert slow.forward.offload == pytest.approx(copied - kept.forward.total)
    assert slow.backward.total == pytest.approx(max(copied, kept.backward.total))
    assert copied > kept.forward.total


def test_linear_layers_of_a_group_share_collectives() -> None:
    config = config_of("model.block=parallel", "overlap.tp=false")
    layers = layers_of(config)
    columns, rows = (part for part in block_spec(config.model, 0) if part.linears)
    gather = layers.exchange.gather()
    for group, gathers in ((columns, 3), (rows, 2)):
        pair = group.seconds(layers, False)
        assert pair.forward.tp + pair.backward.tp == pytest.approx(gathers * gather)  # a reduce-scatter takes as long
    assert of(config).forward.tp == pytest.approx(2 * gather)


def test_fp8_times_apply_to_fp8_layers_only() -> None:
    config = config_of("train.precision=fp8", "fp8.first_layers_bf16=1", "fp8.last_layers_bf16=0")
    first, *others = (
        pair.forward.gemm for pair in chunk_times(LayerTimes.from_config(config, HARDWARE, STACK)).values()
    )
    bf16, fp8 = (of(config, fp8=is_fp8).forward for is_fp8 in (False, True))
    assert first == pytest.approx(bf16.gemm + fp8.gemm)
    assert others[0] == pytest.approx(2 * fp8.gemm)
    assert 1.5 * fp8.gemm < bf16.gemm < 2.5 * fp8.gemm and fp8.elementwise > bf16.elementwise


def test_norms_of_q_and_k_cost_passes_and_over_all_heads_sums() -> None:
    """An element-wise pass each way; with tp the sums of squares are exposed in forward and in backward."""
    keys = ["model.norm=rmsnorm", "parallel.tp=8"]
    plain, head, full = (of(config_of(*keys, f"model.qk_norm={name}")) for name in ("none", "head", "full"))
    assert plain.forward.elementwise < head.forward.elementwise == full.forward.elementwise
    assert plain.backward.elementwise < head.backward.elementwise
    assert plain.forward.tp == head.forward.tp < full.forward.tp
    assert full.backward.tp - head.backward.tp == pytest.approx(full.forward.tp - head.forward.tp)


def test_sinks_cost_passes() -> None:
    """But no time in the attention kernel."""
    plain, sinks = (of(config_of("model.dropout=0.0", f"model.attention_sinks={on}")) for on in ("false", "true"))
    assert plain.forward.elementwise < sinks.forward.elementwise
    assert plain.forward.attention == sinks.forward.attention


EXPERTS = [
    "model.block=serial", "model.bias=false", "model.experts=16", "model.experts_per_token=2",
    "model.expert_ffn_size=8192", "batch.micro=8",
]  # fmt: skip


def experts_of(*keys: str, imbalance: float = 1.0) -> PassTimes:
    config = load_config("configs/gpu/megascale-175b.toml", [*KEYS, *EXPERTS, *keys], world_size=32)
    layers = LayerTimes.from_config(config, HARDWARE, STACK.model_copy(update={"imbalance": imbalance}))
    return next(part for part in block_spec(config.model, 0) if part.expert_numel).seconds(layers, False)


def test_experts_are_split_over_ep_and_exchange_tokens() -> None:
    alone, apart = experts_of("parallel.ep=1"), experts_of("parallel.ep=8")
    assert alone.forward.ep == 0 < apart.forward.ep == pytest.approx(apart.backward.ep, rel=0.03)  # and the counts
    assert alone.forward.gemm == pytest.approx(apart.forward.gemm, rel=0.1)  # as many rows, of fewer experts
    assert apart.backward.gemm == pytest.approx(2 * apart.forward.gemm, rel=0.1)
    assert alone.forward.host == apart.forward.host == HOST_WAIT_S and apart.backward.host == 0


def test_an_uneven_load_takes_longer_in_gemms_and_exchanges() -> None:
    even, uneven = experts_of("parallel.ep=8"), experts_of("parallel.ep=8", imbalance=1.5)
    assert uneven.forward.ep == pytest.approx(1.5 * even.forward.ep)
    assert 1.3 * even.forward.gemm < uneven.forward.gemm < 1.6 * even.forward.gemm


def test_a_capacity_bounds_an_uneven_load() -> None:
    """An expert has 256 of a sequence's slots on average."""
    even, uneven = (experts_of("parallel.ep=8", imbalance=load) for load in (1.25, 1.5))
    bounded, wide = (experts_of("parallel.ep=8", f"moe.capacity_factor={f}", imbalance=1.5) for f in (1.247, 2))
    assert bounded == even and wide == uneven
    small, alone = (experts_of(f"parallel.ep={ep}", "moe.capacity_factor=0.5") for ep in (8, 1))
    assert small.forward.gemm < 0.6 * even.forward.gemm
    assert alone.forward.elementwise < experts_of("parallel.ep=1").forward.elementwise
    assert small.forward.ep == pytest.approx(0.4 * even.forward.ep)


GATHERED = "moe.dispatcher=all_gather"


def test_gathered_tokens_wait_for_no_fullest_rank() -> None:
    """Their exchange is as long for any loads, and shorter than that of rows where a token has more experts than ep."""
    keys = "parallel.ep=2", "model.experts_per_token=4"
    even, uneven = experts_of(*keys, GATHERED), experts_of(*keys, GATHERED, imbalance=1.5)
    assert even.forward.ep == uneven.forward.ep and even.forward.gemm < uneven.forward.gemm
    assert even.forward.ep == pytest.approx(0.5 * experts_of(*keys).forward.ep, rel=0.05)


def test_blocks_of_tokens_expose_the_exchange_of_one() -> None:
    """And what the others take longer than as many blocks' GEMMs: here nothing. These read the weights again."""
    whole, blocks = experts_of("parallel.ep=2"), experts_of("parallel.ep=2", "moe.token_blocks=4")
    assert whole.backward.ep < whole.backward.gemm < blocks.backward.gemm < 4 * whole.backward.gemm
    assert whole.backward.ep / 4 < blocks.backward.ep < 0.3 * whole.backward.ep  # with a latency for each message


def test_a_split_backward_hides_less_behind_dgrad() -> None:
    keys = "parallel.ep=8", "moe.token_blocks=4", "model.expert_ffn_size=512"
    one, split = (experts_of(*keys, f"parallel.schedule={name}") for name in ("1f1b", "zb_h1"))
    assert one.backward.gemm == split.backward.gemm and one.forward == split.forward
    assert one.backward.ep < split.backward.ep


def test_a_grouped_gemm_has_whole_tiles_of_rows() -> None:
    kernels = layers_of(config_of()).kernels
    assert kernels.grouped_gemm(4, 130, 4096, 2048) == kernels.grouped_gemm(4, 256, 4096, 2048)
    forward, wgrad = kernels.grouped_gemm(4, 128, 4096, 2048)
    assert forward == kernels.gemm(128, 4096, 2048, count=4) and wgrad == kernels.gemm(4096, 2048, 128, count=4)


def test_recomputed_exchanges_are_no_recomputation() -> None:
    """They are communication of ep, as those of tp are of tp."""
    config = load_config("configs/gpu/megascale-175b.toml", [*KEYS, *EXPERTS, "parallel.ep=8"], world_size=32)
    none, full = of(config), of(config, replace(NO_RECOMPUTE, full=True))
    assert full.backward.ep == pytest.approx(none.backward.ep + none.forward.ep)
