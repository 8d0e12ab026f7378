"""Layout invariance of training with every rule at its defaults: losses and weights of 20 steps. Prints the table of
docs/results/optimizer-layouts.md:

python -m tests.optim.test_layout_matrix [RULE ...]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.config.run import RunConfig
from tests.optim.layouts import assembled
from tests.runs import LLAMA, config_of, curve_of, settings
from tests.thread_world import run_threads

STEPS = 20

MODEL = LLAMA | {"num_layers": 2, "hidden_size": 48, "ffn_size": 64, "seq_length": 8}
"""A step has 32 tokens: gradients of matrices are singular."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"parallel__dp": 2},
    "tp2": {"parallel__tp": 2, "parallel__sp": True},
    "pp2": {"parallel__pp": 2},
}


EXPERTS = MODEL | {"experts": 8, "experts_per_token": 2, "expert_ffn_size": 16}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 ep2": {"parallel__dp": 2, "parallel__ep": 2},
    "tp2 dp2 ep4": {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__ep": 4},
}


INNER = {"parallel__dp": 4, "parallel__dp_shard": 2}
HYBRID_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4 in twos": INNER,
    "dp4 in twos, state over all": {**INNER, "parallel__zero": 3, "parallel__state_shard": "all"},
}


class Outcome(NamedTuple):
    """Losses and gradient norms of a run by step, and its weights by global name."""

    curve: list[tuple[float, float]]
    weights: dict[str, Tensor]


def configuration(
    rule: str, precision: str, folder: Path, model: Mapping[str, Any] = MODEL, **layout: Any
) -> RunConfig:
    """Return the configuration of a run with a rule's defaults, but for a rank above the model's width."""
    keys = {"optimizer__name": rule, "optimizer__lr": 1e-3, "train__precision": precision, "train__steps": STEPS}
    keys |= {"optimizer__options": {"rank": 16}} if rule == "compact" else {}
    return config_of(settings(dict(model), folder, **{"batch__micro": 2, "batch__global": 4, **keys, **layout}), folder)


def outcome(config: RunConfig, steps: int = STEPS) -> Outcome:
    """Train in threads."""

    def train(run: Any) -> Any:
        curve, found = curve_of(run, steps), run.optimizer.global_tensors()
        return curve, {
            name: [(tensor.shape, shard.offset, shard.data) for shard in tensor.shards]
            for name, tensor in found.items()
            if name.startswith("weights.")
        }

    ranks = run_threads(config, train)
    return Outcome(ranks[0][0], assembled([weights for _, weights in ranks]))


class Difference(NamedTuple):
    """The largest of a run's losses, relative, and of its weights, relative to the largest of the tensor, and whose."""

    loss: float
    weight: float
    tensor: str


def difference(ours: Outcome, theirs: Outcome) -> Difference:
    """Compare a layout with one process."""
    loss = max(abs(a / b - 1) for (a, _), (b, _) in zip(ours.curve, theirs.curve, strict=True))
    by_tensor = {
        name: float((ours.weights[name] - values).norm() / values.norm()) for name, values in theirs.weights.items()
    }
    tensor = max(by_tensor, key=lambda name: by_tensor[name])
    return Difference(loss, by_tensor[tensor], tensor.removeprefix("weights."))


def worst(
    rule: str, precision: str, folder: Path, steps: int = STEPS, layouts: Iterable[str] = tuple(LAYOUTS), **keys: Any
) -> Difference:
    """Return the largest differences over layouts."""
    alone = outcome(configuration(rule, precision, folder, **keys), steps)
    found = [
        difference(outcome(configuration(rule, precision, folder, **given, **keys), steps), alone)
        for given in map((LAYOUTS | EXPERT_LAYOUTS | HYBRID_LAYOUTS).__getitem__, layouts)
    ]
    heaviest = max(found, key=lambda one: one.weight)
    return heaviest._replace(loss=max(one.loss for one in found))


CERTAIN_IN_FP32 = {
    "soap": 1e-3, "conda": 1e-2, "grad_norm_lorp": 1e-3, "adamw_8bit": 1e-3, "galore_8bit": 1e-3, "shampoo": 1e-4,
    "galore": 1e-4,
}  # fmt: skip
"""Bounds of the weights in fp32 as documented; those of other rules are equal to 1e-5."""


@pytest.mark.parametrize("rule", ["soap", "shampoo", "conda", "galore"])
def test_a_few_steps_of_rules_with_bases(rule: str, tmp_path: Path) -> None:
    """With new ones in every second step."""
    found = worst(rule, "fp64", tmp_path, steps=4, layouts=("dp2",), optimizer__options={"update_gap": 2})
    assert found.loss < 1e-10 and found.weight < 1e-10, found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("rule", OPTIMIZERS.names())
def test_every_rule_at_its_defaults(rule: str, precision: str, tmp_path: Path) -> None:
    found, fp64 = worst(rule, precision, tmp_path), precision == "fp64"
    assert found.loss < (1e-10 if fp64 else 1e-4 if rule == "conda" else 1e-5), found
    assert found.weight < (1e-10 if fp64 else CERTAIN_IN_FP32.get(rule, 1e-5)), found


@pytest.mark.slow
@pytest.mark.parametrize("rule", [name for name in OPTIMIZERS.names() if name != "compact"])
def test_every_rule_with_experts(rule: str, tmp_path: Path) -> None:
    found = worst(rule, "fp64", tmp_path, steps=6, layouts=tuple(EXPERT_LAYOUTS), model=EXPERTS)
    assert found.loss < 1e-10 and found.weight < 1e-10, found


@pytest.mark.slow
@pytest.mark.parametrize("rule", OPTIMIZERS.names())
def test_every_rule_with_hybrid_sharding(rule: str, tmp_path: Path) -> None:
    found = worst(rule, "fp64", tmp_path, steps=6, layouts=tuple(HYBRID_LAYOUTS), batch__micro=1)
    assert found.loss < 1e-10 and found.weight < 1e-10, found


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["soap", "shampoo", "conda", "galore", "grad_norm_lorp"])
def test_new_bases_every_three_steps(rule: str, tmp_path: Path) -> None:
    found = worst(rule, "fp64", tmp_path, optimizer__options={"update_gap": 3})
    assert found.loss < 1e-10 and found.weight < 1e-10, found


@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_rounding_of_a_bias_of_k_touches_nothing_else(rule: str, tmp_path: Path) -> None:
    """Its gradient is 0, since softmax does not see it; Lion moves it by its rate."""
    model = MODEL | {"position": "learned", "bias": True}
    alone, split = (outcome(configuration(rule, "fp64", tmp_path, model, **keys), 3) for keys in ({}, LAYOUTS["dp2"]))
    biases = [name for name in alone.weights if name.endswith("k.bias")]
    assert len(biases) == 2
    for name in biases:
        assert (float(alone.weights[name].abs().max()) > 1e-4) == (rule == "lion"), "a sign has no small values"
        del alone.weights[name], split.weights[name]
    found = difference(split, alone)
    assert found.loss < 1e-10 and found.weight < 1e-10, found


def main(rules: list[str]) -> None:
    """Print the table."""
    print("| rule | fp64: loss | weights | fp32: loss | weights |\n|---|---|---|---|---|")
    for rule in rules or OPTIMIZERS.names():
        with tempfile.TemporaryDirectory() as folder:
            one, two = (worst(rule, precision, Path(folder)) for precision in ("fp64", "fp32"))
        cells = f"{one.loss:.0e} | {one.weight:.0e} | {two.loss:.0e} | {two.weight:.0e} |"
        print(f"| `{rule}` | {cells}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
