"""Recipes follow each other at the same step in every run, resumed or not, and none uses operands of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError
from megascale.core.rank import Rank
from megascale.plan.account.memory import JobMemory
from megascale.plan.dryrun.dry_run import dry_run
from tests.marks import only_quick
from tests.parallel.test_fp8_linear import save_and_train
from tests.runs import LLAMA, build_run, config_of, curve_of, settings, train_curve
from tests.worlds import run_world

Curve = list[tuple[float, float]]

STEPS, BATCH = 8, 2

MODEL = LLAMA | {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 64, "seq_length": 32}


def configured(folder: Path, schedule: list[Any], recipe: str = "tensorwise", **more: Any) -> RunConfig:
    more = {"train__precision": "fp8", "batch__global": BATCH, "train__steps": STEPS, "optimizer__lr": 1e-3} | more
    more |= {"fp8__recipe": recipe, "fp8__schedule": schedule}
    return config_of(settings(MODEL, folder, **more), folder).resolve(None)


def curves(rank: Rank, configs: list[RunConfig]) -> list[Curve]:
    return [train_curve(rank, config, STEPS) for config in configs]


def train(*configs: RunConfig) -> list[Curve]:
    """Train runs of equal layouts one after another."""
    return run_world(configs[0].world_size, curves, [*configs])[0]


SCHEDULES = {
    "healing": ("tensorwise", [[0.5, "bf16"]]),
    "forward": ("rowwise", [[0.5, "bf16_forward"]]),
    "delayed": ("delayed", [[0.5, "bf16_forward"]]),
    "delayed later": ("rowwise", [[0.25, "bf16"], [0.5, "delayed"]]),
    "nvfp4": ("nvfp4", [[0.5, "mxfp8"], [0.75, "bf16"]]),
}


@pytest.mark.parametrize("name", only_quick(SCHEDULES, "healing", "delayed later"))
def test_a_run_resumed_beside_a_change_is_bit_equal(name: str, tmp_path: Path) -> None:
    recipe, schedule = SCHEDULES[name]
    configs = [configured(tmp_path / str(stop), schedule, recipe, checkpoint__every=1) for stop in (3, 4, 5)]
    whole, *resumed = run_world(1, stopped_and_resumed, configs)[0]
    assert resumed == [whole] * 3


def stopped_and_resumed(rank: Rank, configs: list[RunConfig]) -> list[Curve]:
    """Train without a stop, and with one after 3, 4 and 5 steps."""
    stopped = [save_and_train(rank, config, stop) for config, stop in zip(configs, (3, 4, 5), strict=True)]
    resumed = [save_and_train(rank, config, STEPS - stop) for config, stop in zip(configs, (3, 4, 5), strict=True)]
    both = [first + second for first, second in zip(stopped, resumed, strict=True)]
    return [train_curve(rank, configs[0], STEPS), *both]


def test_the_recipe_changes_at_a_share_of_the_run(tmp_path: Path) -> None:
    changes = {4: [[0.5, "bf16"]], 5: [[0.51, "rowwise"]], 6: [[0.75, "bf16_forward"]]}
    unchanged, *others = train(*(configured(tmp_path, schedule) for schedule in ([], *changes.values())))
    for step, changed in zip(changes, others, strict=True):
        assert changed[:step] == unchanged[:step] and changed[step] != unchanged[step], step


LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded weights": {"parallel__dp": 2, "parallel__zero": 3},
    "tp": {"parallel__tp": 2, "parallel__sp": True},
    "split backward": {"parallel__pp": 2, "parallel__schedule": "zb_h1"},
}


@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "sharded weights"))
def test_layouts_change_alike(layout: str, tmp_path: Path) -> None:
    schedules = [[[0.5, "bf16"]], [[0.5, "bf16_forward"]]]
    alone, ours = (train(*(configured(tmp_path, each, **more) for each in schedules)) for more in ({}, LAYOUTS[layout]))
    for curve, expected in zip(ours, alone, strict=True):
        for (loss, norm), (other, other_norm) in zip(curve, expected, strict=True):
            assert loss == pytest.approx(other, rel=2e-3) and norm == pytest.approx(other_norm, rel=5e-2)


def test_healing_uses_no_operand_of_a_step_before(tmp_path: Path) -> None:
    """From there on the run equals one of bf16 that resumes."""
    config = configured(tmp_path, [[0.5, "bf16"]], checkpoint__every=1)
    in_bf16 = configured(tmp_path, [], train__precision="bf16", checkpoint__every=1)
    healed, resumed = run_world(1, healed_and_resumed, config, in_bf16)[0]
    assert healed[4:] == resumed


def healed_and_resumed(rank: Rank, config: RunConfig, in_bf16: RunConfig) -> tuple[Curve, Curve]:
    whole = train_curve(rank, config, STEPS)
    save_and_train(rank, config, 4)
    return whole, save_and_train(rank, in_bf16, 4)


def kept_bytes(rank: Rank, config: RunConfig) -> list[int]:
    """The bytes of quantized weights after each step."""
    from megascale.model.modules import Linear
    from megascale.parallel.fp8_linear import Fp8Gemms

    run, found = build_run(rank, config), []
    for _ in range(STEPS):
        curve_of(run, 1)
        gemms = [each.params.gemms for stage in run.stages for each in stage.modules() if isinstance(each, Linear)]
        casts = [cast for each in gemms if isinstance(each, Fp8Gemms) for cast in each._kept.operands]
        found.append(sum(cast.nbytes for cast in casts))
    return found


def test_memory_is_that_of_the_largest_phase(tmp_path: Path) -> None:
    config = configured(tmp_path, [[0.5, "bf16"]])
    kept = run_world(1, kept_bytes, config)[0]
    assert min(kept[:4]) > 0 and kept[4:] == [0] * 4
    alone = configured(tmp_path, []), configured(tmp_path, [], train__precision="bf16")
    assert JobMemory(config).rank(0).total == max(JobMemory(each).rank(0).total for each in alone)
    forward = configured(tmp_path, [[0.5, "bf16_forward"]])
    assert JobMemory(forward).rank(0).total > JobMemory(config).rank(0).total
    peaks = [sum(dry_run(each, 0).peak.values()) for each in (config, *alone)]
    assert peaks[0] == max(peaks[1:])
    assert sum(dry_run(forward, 0).peak.values()) == pytest.approx(JobMemory(forward).rank(0).total, rel=0.05)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_a_format_of_scales_is_for_the_recipes_without_one(recipe: str, tmp_path: Path) -> None:
    """Of all phases one has an effect of the key."""
    others = [[0.5, "mxfp8" if recipe == "rowwise" else "rowwise"], [0.75, "nvfp4"]]
    config = configured(tmp_path, others, recipe, fp8__scale="pow2")
    scales = [section.facts["input"].scale for _, section in config.fp8.phases]
    assert sorted(scales) == ["e8m0", "nvfp4", "pow2"]


class Noted:
    """A writer of metrics that keeps messages."""

    name = "notes"

    def __init__(self) -> None:
        self.messages = list[str]()

    def write(self, record: Any) -> None:
        pass

    def write_message(self, text: str) -> None:
        self.messages.append(text)


def messages(rank: Rank, config: RunConfig, resumed: int) -> list[str]:
    from megascale.train.fp8_casts import RecipeChanges
    from megascale.train.reporter import Reporter
    from megascale.train.standard_hooks import standard_hooks

    run, notes = build_run(rank, config), Noted()
    run.progress.step, run.progress.samples = resumed, resumed * BATCH
    reporter = Reporter(config, run.device, None, [notes], run.mesh.recorder)
    hooks = [hook for hook in standard_hooks(run, reporter)._hooks if isinstance(hook, RecipeChanges)]
    for step in range(resumed, STEPS):
        run.progress.step, run.progress.samples = step, step * BATCH
        for hook in hooks:
            hook.step_begins(run)
    return notes.messages


def test_the_console_names_a_change(tmp_path: Path) -> None:
    config = configured(tmp_path, [[0.5, "rowwise"], [0.75, "bf16"]])
    later = "step 7 and later run bf16 by fp8.schedule"
    assert run_world(1, messages, config, 0) == [["step 5 and later run rowwise by fp8.schedule", later]]
    assert run_world(1, messages, config, 7) == [[later.replace("7", "8")]]
    assert run_world(1, messages, configured(tmp_path, [[0.5, "rowwise"]], train__precision="bf16"), 0) == [[]]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([[0.5, "bf16"], [0.4, "tensorwise"]], "tensorwise at 0.4 does not come after 0.5"),
        ([[0.5, "tensorwise"]], "tensorwise at 0.5 follows itself"),
        ([["bf16", 0.5]], "['bf16', 0.5]: should be [[share of the run, recipe], ...]"),
        ([0.5, "bf16"], "[0.5, 'bf16']: should be [[share of the run, recipe], ...]"),
        ([[0.5, "bf16", "mxfp8"]], "should be [[share of the run, recipe], ...]"),
        ([[0, "bf16"]], "with shares above 0 and below 1"),
        ([[5000, "bf16"]], "a share is a step divided by train.steps"),
        ([[0.5, "fp3"]], "'fp3' is not one of bf16, bf16_forward, tensorwise"),
        ([[0.5, "bf17"]], "did you mean 'bf16'?"),
        ([[0.5, "blockwise"]], "the fp8 recipe blockwise needs multiples of 128"),
    ],
)
def test_mistakes_in_a_schedule(schedule: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="problem") as error:
        configured(tmp_path, schedule)
    assert message in str(error.value)
