"""A new kind of block needs a module, a description and a card; FLOPs, traffic, memory and FP8 follow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale.catalog.layers import BLOCKS
from megascale.cli.main import main
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError
from megascale.core.rank import Rank
from megascale.core.registry import Card
from megascale.layout import blocks
from megascale.layout.blocks import BlockSpec
from megascale.layout.chunks import fp8_layers, fp8_weights
from megascale.layout.parameters import layer_params, parameter_count
from megascale.layout.parts.elementwise import NormSpec, ResidualAdd
from megascale.layout.parts.linear import ColumnParallel, RowParallel
from megascale.model.attention import Attention
from megascale.model.mlp import MLP
from megascale.model.modules import LayerContext, residual_dropout
from megascale.model.modules import Norm as NormModule
from megascale.parallel.microbatch import MicroBatch
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.traffic import step_traffic
from tests.marks import only_quick
from tests.plan.account.executed_flops import rank_flops
from tests.plan.account.test_against_dry_run import sent_by
from tests.runs import LLAMA, config_of, settings, train_curve, write_config
from tests.worlds import run_world


class PostLNBlock(nn.Module):
    """norm(x + attention(x)), then norm(. + mlp(.)): the residual stream itself is normalized (Vaswani et al. 2017)."""

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.attention, self.attention_end = Attention(context, index), NormModule(context, f"{name}.attention_end")
        self.mlp, self.mlp_end = MLP(context, index), NormModule(context, f"{name}.mlp_end")
        self._drop = lambda x, batch, branch: residual_dropout(x, batch, f"{name}.{branch}", context)

    def forward(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Tensor:
        total = x_sbh + self._drop(self.attention(x_sbh, batch), batch, "attention.out")
        x_sbh = self.attention_end(total)
        branch = self.mlp(x_sbh, batch, self.attention_end.recompute_norm(total))
        return self.mlp_end(x_sbh + self._drop(branch, batch, "mlp.down"))


def post_ln(model: ModelConfig, layer: int) -> BlockSpec:
    """The parts of a `PostLNBlock`."""
    return (
        ColumnParallel((blocks.qkv(model),)), blocks.attention(model, layer), RowParallel((blocks.out(model),)),
        ResidualAdd(), NormSpec("attention_end"),
        *blocks.mlp(model), ResidualAdd(), NormSpec("mlp_end"),
    )  # fmt: skip


CARD = Card(
    "post_ln",
    "a norm of the residual stream after each branch",
    f"{__name__}:PostLNBlock",
    {"description": f"{__name__}:post_ln", "operations": ()},
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS.cards, CARD.name, CARD)


def trained(rank: Rank, config: RunConfig) -> list[tuple[float, float]]:
    """Train a few steps, in a process with the block registered first."""
    BLOCKS.cards[CARD.name] = CARD
    return train_curve(rank, config, 3)


def small(folder: Path, **overrides: Any) -> RunConfig:
    return config_of(settings(LLAMA | {"block": CARD.name}, folder, **overrides), folder)


@pytest.mark.slow
def test_training_is_equal_in_every_layout(tmp_path: Path) -> None:
    one_rank = run_world(1, trained, small(tmp_path, model__dropout=0.1))[0]
    assert all(math.isfinite(value) for step in one_rank for value in step)
    for layout in ({"parallel__tp": 2, "parallel__sp": True, "train__recompute": "full"}, {"parallel__pp": 2}):
        (curve, *_) = run_world(2, trained, small(tmp_path, model__dropout=0.1, **layout))
        assert torch.allclose(torch.tensor(curve), torch.tensor(one_rank), rtol=1e-10, atol=0)


def test_a_block_without_steps_has_no_halves(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the block does not compute in steps"):
        small(tmp_path, parallel__tp=2, batch__micro=2, overlap__tp="domino")


def test_parameters_follow_the_description(tmp_path: Path) -> None:
    model = small(tmp_path).model
    parallel = model.model_copy(update={"block": "parallel"})
    assert parameter_count(model) - parameter_count(parallel) == model.num_layers * model.hidden_size  # one more norm
    names = {parameter.name for parameter in layer_params(model, 0)}
    assert {"layers.0.attention_end.weight", "layers.0.mlp_end.weight"} <= names


PRECISION_RECOMPUTE = [("bf16", "none"), ("bf16", "full"), ("fp8", "none"), ("fp8", "full")]


@pytest.mark.parametrize("case", only_quick(PRECISION_RECOMPUTE), ids="-".join)
def test_flops_traffic_and_memory_equal_the_dry_run(case: tuple[str, str], tmp_path: Path) -> None:
    from megascale.plan.dryrun.dry_run import dry_run

    precision, recompute = case
    sizes = {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336, "seq_length": 4096}
    config = small(
        tmp_path, **{f"model__{key}": value for key, value in sizes.items()}, parallel__tp=2, parallel__sp=True,
        train__precision=precision, train__recompute=recompute, batch__micro=2,
    )  # fmt: skip
    dry = dry_run(config, 0)
    assert step_traffic(config, dry.coord) == sent_by(dry)
    assert rank_flops(config, 0) == dry.flops.total()
    peak = dry.peak.total()
    assert peak > 4 << 30 and -0.03 < JobMemory(config).rank(0).total / peak - 1 < 0.05


def test_fp8_selects_the_linear_layers(tmp_path: Path) -> None:
    sizes = {"model__hidden_size": 128, "model__ffn_size": 256, "model__num_kv_heads": 4}
    config = small(tmp_path, train__precision="fp8", fp8__first_layers_bf16=0, fp8__last_layers_bf16=0, **sizes)
    names = {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}
    expected = {
        f"layers.{layer}.{name}.weight"
        for layer in fp8_layers(config.model, config.train, config.fp8)
        for name in names
    }
    assert (
        set(fp8_weights(config.model, fp8_layers(config.model, config.train, config.fp8))) == expected
        and len(expected) == 16
    )


def test_check_and_plan_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_config(settings(LLAMA | {"block": CARD.name}, tmp_path), tmp_path / "run.toml"))
    assert main(["check", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] > 0
    assert main(["plan", path, "--hardware", "h100", "--gpus", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] > 0
