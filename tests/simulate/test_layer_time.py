"""Times of blocks follow from their descriptions, whatever kind of block that is."""

from __future__ import annotations

import pytest

from megascale.catalog.layers import BLOCKS
from megascale.config.explain import load
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.registry import Card
from megascale.layout.blocks import Block, Columns, Norm, Residual, Rows, block, parts, serial
from megascale.layout.recompute import NOTHING, Recompute
from megascale.simulate import profiles
from megascale.simulate.layer_time import Layers, Pair, chunk_times

HARDWARE, STACK = profiles.hardware("h100"), profiles.stack("megascale")
KEYS = ["model.num_layers=8", "parallel.pp=4", "parallel.vpp=1", "batch.global=16"]


def sandwich(model: ModelConfig, layer: int) -> Block:
    """A serial block with a norm behind each branch as well."""
    return tuple(
        each for part in serial(model, layer) for each in ([Norm("after"), part] if part == Residual() else [part])
    )


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sandwich.__globals__, "sandwich", sandwich)
    card = Card("sandwich", "", "nowhere:Block", {"description": f"{__name__}:sandwich", "operations": ()})
    monkeypatch.setitem(BLOCKS.cards, "sandwich", card)


def config_of(*keys: str) -> RunConfig:
    return load("configs/gpu/megascale-175b.toml", [*KEYS, *keys], world=32)


def layers_of(config: RunConfig) -> Layers:
    return Layers.of(config, HARDWARE, STACK)


def of(config: RunConfig, recompute: Recompute = NOTHING, fp8: bool = False) -> Pair:
    return layers_of(config).block(block(config.model, 0), fp8, recompute)


def test_a_block_is_the_sum_of_its_parts() -> None:
    for kind in ("serial", "parallel"):
        config = config_of(f"model.block={kind}", "model.window=512")
        layers, described = layers_of(config), block(config.model, 0)
        total = sum((layers.part(part, False) for part in described), Pair())
        assert of(config) == total
        assert total.forward.total > 0 and total.backward.gemm == pytest.approx(2 * total.forward.gemm, rel=0.1)


def test_a_third_kind_of_block_needs_its_description_alone(third: None) -> None:
    known, other = config_of(), config_of("model.block=sandwich")
    norm = layers_of(other).part(Norm("after"), False)
    ours, theirs = of(known), of(other)
    assert theirs.forward.elementwise == pytest.approx(ours.forward.elementwise + 2 * norm.forward.elementwise)
    assert theirs.backward.elementwise == pytest.approx(ours.backward.elementwise + 2 * norm.backward.elementwise)
    assert (theirs.forward.gemm, theirs.forward.tp) == (ours.forward.gemm, ours.forward.tp)
    for place, pair in chunk_times(other, HARDWARE, STACK).items():
        assert pair.forward.elementwise > chunk_times(known, HARDWARE, STACK)[place].forward.elementwise


def test_only_norms_before_column_parallel_layers_are_formed_again(third: None) -> None:
    recompute = Recompute(norm=True)
    again = [of(config_of(f"model.block={kind}"), recompute).backward.recompute for kind in ("serial", "sandwich")]
    norm = layers_of(config_of()).part(Norm("any"), False).forward.elementwise
    assert again == pytest.approx([2 * norm, 2 * norm])


def test_a_result_that_a_norm_reads_is_computed_again(third: None) -> None:
    """Of a serial block the last linear layer is left out, of a sandwich nothing."""
    for kind, left_out in (("serial", True), ("sandwich", False)):
        config = config_of(f"model.block={kind}")
        whole, again = of(config), of(config, Recompute(full=True))
        *_, last = parts(block(config.model, 0), Rows)
        part = layers_of(config).part(last, False).forward
        expected = whole.forward.total - whole.forward.tp - (part.total - part.tp) * left_out
        assert again.backward.recompute == pytest.approx(expected)
        assert again.backward.tp == pytest.approx(whole.backward.tp + whole.forward.tp - part.tp * left_out)


def test_layers_side_by_side_share_their_collectives() -> None:
    config = config_of("model.block=parallel", "overlap.tp=false")
    layers = layers_of(config)
    (columns,), (rows,) = (list(parts(block(config.model, 0), kind)) for kind in (Columns, Rows))
    gather = layers.exchange.gather()
    for group, gathers in ((columns, 3), (rows, 2)):
        pair = layers.part(group, False)
        assert pair.forward.tp + pair.backward.tp == pytest.approx(gathers * gather)  # a scatter takes as long
    assert of(config).forward.tp == pytest.approx(2 * gather)


def test_fp8_is_of_the_layers_that_are_in_it() -> None:
    config = config_of("train.precision=fp8", "fp8.bf16_first=1", "fp8.bf16_last=0")
    first, *others = (pair.forward.gemm for pair in chunk_times(config, HARDWARE, STACK).values())
    sixteen, eight = (of(config, fp8=fp8).forward for fp8 in (False, True))
    assert first == pytest.approx(sixteen.gemm + eight.gemm)
    assert others[0] == pytest.approx(2 * eight.gemm)
    assert 1.5 * eight.gemm < sixteen.gemm < 2.5 * eight.gemm and eight.elementwise > sixteen.elementwise
