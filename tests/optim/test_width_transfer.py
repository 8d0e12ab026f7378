"""muP: scales by the width, and how far a few steps move the logits of narrow and wide models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megascale.layout.param_groups import ParamGroups
from megascale.layout.parameters import all_params
from megascale.train.step import train_step
from tests.logits import logits_of
from tests.marks import only_quick
from tests.optim.layouts import SMALL, configuration
from tests.thread_world import run_threads

MODEL = SMALL | {"tie_embeddings": False, "num_heads": 4, "num_kv_heads": 4}


def model_of(width: int, base: int) -> dict[str, Any]:
    """Return a model of this width, with heads of 8 and an MLP of twice the width."""
    heads = {"num_heads": width // 8, "num_kv_heads": width // 8}
    return MODEL | {"hidden_size": width, "ffn_size": 2 * width, **heads, "mup_base_width": base}


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        ({"name": "adamw"}, 1 / 4),
        ({"name": "muon"}, 1 / 2),
        ({"name": "muon", "options": {"adjust_lr": "original"}}, 1.0),
        ({"name": "adafactor"}, 1 / 2),
        ({"name": "adafactor", "options": {"scale_parameter": False}}, 1 / 4),
        ({"name": "sinkgd"}, 1 / 4),
        ({"name": "soap"}, 1 / 2),
        ({"name": "galore"}, 1 / 2),
    ],
)
def test_scales_by_kind(optimizer: dict[str, Any], factor: float, tmp_path: Path) -> None:
    """Four times the width: the table of docs/optimizers.md."""
    wide = configuration(tmp_path, optimizer | {"weight_decay": 0.1}, model_of(64, 16))
    base = {part.name: part for parameter in all_params(wide.model) for part in parameter.parts}
    plain = {part.name: part for p in all_params(_plain(wide).model) for part in p.parts}
    groups = ParamGroups(wide.optimizer)
    for parameter in all_params(wide.model):
        for part in parameter.parts:
            group, ratio = groups.group_of(parameter, part), base[part.name].std / (plain[part.name].std or 1.0)
            rate, std = {"matrix": (factor, 0.5), "head": (1 / 4, 1 / 4)}.get(parameter.kind, (1.0, 1.0))
            assert group.lr_mult == pytest.approx(rate) and group.weight_decay * rate == pytest.approx(0.1)
            assert part.init != "normal" or ratio == pytest.approx(std)


def _plain(config: Any) -> Any:
    return config.model_copy(update={"model": config.model.model_copy(update={"mup_base_width": 0})})


def change_of_logits(run: Any) -> float:
    """Return the root mean square change of the logits of a fixed batch by a few steps."""
    (stage,), batch = run.pipeline.stages, run.train_loader.batch(0).micro_batches[0]
    before = logits_of(stage, batch).clone()
    for _ in range(4):
        train_step(run, run.train_loader.batch(run.progress.samples))
    run.buffers.finish_param_gather()
    return float((logits_of(stage, batch) - before).square().mean().sqrt())


FROZEN = [{"kinds": ["embedding", "head", "norm"], "name": "adamw", "lr_mult": 0.0}]
"""Only matrices of blocks are trained, since the head's steps would hide theirs."""


RUN = {"train__precision": "fp32", "batch__micro": 8}


def moved(folder: Path, optimizer: dict[str, Any], width: int, base: int, seeds: range) -> float:
    """How far steps move the logits of a model of this width, in units of a model of width 32: the geometric mean over
    seeds, of which one says little (GaLore's: 0.6 to 1.4 times AdamW's).
    """
    keys = {"lr": 0.02, "weight_decay": 0.0, **optimizer}
    configs = [
        configuration(folder / f"{size}-{seed}", keys, model_of(size, of), **RUN, train__seed=seed)
        for seed in seeds
        for size, of in ((32, 32), (width, base))
    ]
    found = [run_threads(config, change_of_logits)[0] for config in configs]
    return math.prod(wide / narrow for narrow, wide in zip(found[::2], found[1::2], strict=True)) ** (1 / len(seeds))


def test_steps_move_the_logits_of_a_wide_model_as_far(tmp_path: Path) -> None:
    """With the learning rate of the narrow model; without muP they move further, the wider the model is."""
    assert 0.6 < moved(tmp_path / "mup", {"name": "adamw"}, 128, 32, range(1)) < 1.6
    assert moved(tmp_path / "plain", {"name": "adamw"}, 128, 0, range(1)) > 2


RULES_IN_A_BASIS = {
    "soap": {"update_gap": 1}, "conda": {"update_gap": 1}, "galore": {"rank": 8, "update_gap": 1}, "muon": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def moved_by_adamw(tmp_path_factory: pytest.TempPathFactory) -> float:
    return moved(tmp_path_factory.mktemp("adamw"), {"name": "adamw", "groups": FROZEN}, 128, 32, range(4))


@pytest.mark.parametrize("rule", only_quick(RULES_IN_A_BASIS, "soap", "muon"))
def test_matrices_move_the_logits_as_with_adamw(rule: str, moved_by_adamw: float, tmp_path: Path) -> None:
    """The power of the width is the rule's, to a quarter: AdamW's own steps move the logits of these models less with
    the width.
    """
    optimizer = {"name": rule, "options": RULES_IN_A_BASIS[rule], "groups": FROZEN}
    assert 4**-0.25 < moved(tmp_path, optimizer, 128, 32, range(4)) / moved_by_adamw < 4**0.25


def test_the_base_width_changes_nothing(tmp_path: Path) -> None:
    config = configuration(tmp_path, {"name": "adamw"}, model_of(32, 32))
    for ours, plain in zip(all_params(config.model), all_params(_plain(config).model), strict=True):
        assert ours == plain
    assert math.isclose(config.model.width_ratio, 1.0)
