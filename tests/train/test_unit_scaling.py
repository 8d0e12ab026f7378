"""Unit scaling at initialization: variances of what linear layers read and write, and the sizes that `static` FP8
scales expect.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megascale.layout.param_groups import ParamGroups
from megascale.layout.parameters import all_params
from megascale.parallel.fp8_linear import Fp8Gemms
from megascale.parallel.linear_gemms import LinearGemms
from megascale.train.run import Run
from megascale.train.step import train_step
from tests.runs import LLAMA, config_of, settings
from tests.thread_world import run_threads

WIDTH = 256
UNIT = LLAMA | {
    "block": "post_norm", "activation": "gelu", "unit_scaling": True, "mup_base_width": 64, "hidden_size": WIDTH,
    "ffn_size": 4 * WIDTH, "num_kv_heads": 4, "num_layers": 3, "vocab_size": 512, "seq_length": 128,
}  # fmt: skip
LINEARS = 4 * 3


def one_step(run: Run) -> None:
    train_step(run, run.train_loader.batch(0))


def square(x: Tensor) -> float:
    return float(x.float().square().mean())


def test_variance_of_linear_layers_and_of_the_residual_stream(tmp_path: Path, monkeypatch: Any) -> None:
    """A linear layer keeps the mean square of its input, and the stream into a block has 1."""
    seen, streams, gemm = list[float](), list[float](), LinearGemms.gemm

    def watched(self: LinearGemms, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        out = gemm(self, x, weight, *rest)
        if len(seen) < LINEARS:  # later ones are dgrad
            seen.append(square(out) / square(x))
            streams.extend([square(x)] * (weight.shape[1] == WIDTH != weight.shape[0]))
        return out

    monkeypatch.setattr(LinearGemms, "gemm", watched)
    config = config_of(settings(UNIT, tmp_path, train__precision="fp32", batch__global=2), tmp_path)
    run_threads(config, one_step)
    assert len(seen) == LINEARS and seen == pytest.approx([1.0] * LINEARS, abs=0.1)
    assert len(streams) == LINEARS // 2 and streams == pytest.approx([1.0] * len(streams), abs=0.06)


def test_static_scales_bring_operands_to_unit_size(tmp_path: Path, monkeypatch: Any) -> None:
    """Weights and inputs from the residual stream have it exactly; activations and averages of values are below, and so
    are gradients, whose scale is 1 / hidden_size, the head's multiplier.
    """
    sizes, cast = defaultdict[str, list[float]](list), Fp8Gemms._cast

    def watched(self: Fp8Gemms, name: Any, x: Tensor, **keys: Any) -> Any:
        scale = float(self.static_amaxes[name]) / self.state.recipe.rows[name].element.max_value
        place = "stream" if name == "input" and self.shard_dim == 0 else name
        sizes[place].append(math.sqrt(square(x)) / scale)
        return cast(self, name, x, **keys)

    monkeypatch.setattr(Fp8Gemms, "_cast", watched)
    fp8 = {"recipe": "static", "first_layers_bf16": 0, "last_layers_bf16": 0}
    keys = {f"fp8__{key}": value for key, value in fp8.items()} | {"train__precision": "fp8", "batch__global": 1}
    run_threads(config_of(settings(UNIT, tmp_path, **keys), tmp_path), one_step)
    for place, low, high in (("stream", 0.95, 1.05), ("weight", 0.98, 1.02), ("input", 0.2, 1.0), ("gradient", 0.1, 4)):
        assert len(sizes[place]) >= LINEARS // 2
        assert low < min(sizes[place]) <= max(sizes[place]) < high, (place, sizes[place])


def test_rates_and_sizes_of_a_wide_model(tmp_path: Path) -> None:
    """Weights times multipliers: hidden layers have the rate sqrt(base width / width) inputs^-1/2."""
    keys = {"optimizer__weight_decay": 0.1, "optimizer__name": "lion"}
    config = config_of(settings(UNIT, tmp_path, **keys), tmp_path)
    groups = ParamGroups(config.optimizer)
    for parameter in all_params(config.model):
        for part in parameter.parts:
            group, inputs = groups.group_of(parameter, part), part.shape[-1]
            expected = {"matrix": (inputs**-0.5, 0.5 * inputs**-0.5), "head": (1 / inputs, 1 / inputs)}
            std, rate = expected.get(parameter.kind, (1.0, 1.0))
            assert group.lr_mult == pytest.approx(rate) and group.weight_decay * rate == pytest.approx(0.1)
            assert part.init != "normal" or part.std == pytest.approx(std)
