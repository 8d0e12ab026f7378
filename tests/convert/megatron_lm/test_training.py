"""Runs of megatron-core go on here from its checkpoints, and its own from ours, as if nothing had happened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.config.foreign.imported import import_arguments
from megascale.convert.megatron_lm.conversion import from_megatron, to_megatron
from megascale.core.storage import Location
from megascale.parallel.stateful import WEIGHTS
from tests.convert.megatron_lm.cases import ARGUMENTS, MODELS, SAMPLES, STEPS, draw_tokens, go_on, ours
from tests.convert.megatron_lm.peer import BUCKETS, LEGACY, LR, RESHARDABLE, Outcome, Task, run
from tests.runs import config_of
from tests.worlds import run_world


@dataclass(frozen=True)
class Case:
    """A run of megatron-core on `world` ranks, the layout `here` that goes on with it, and theirs that goes on with
    ours, if it is another one.
    """

    model: str
    world: int
    layout: dict[str, int]
    here: dict[str, Any]
    distributed: str = ""
    back: dict[str, int] | None = None


SCHEDULE = ("decay", "min_lr", "schedule_steps", "warmup_steps")

CASES = {
    "gpt tp2": Case("gpt", 2, {"tp": 2}, {"parallel__pp": 2}),
    "gpt pp2 vpp2 distributed": Case("gpt", 2, {"pp": 2, "vpp": 2}, {"parallel__tp": 2}, RESHARDABLE),
    "gpt dp2 distributed": Case("gpt", 2, {}, {"parallel__tp": 2, "parallel__sp": True}, RESHARDABLE),
    "gpt tp2 pp2 buckets": Case("gpt", 4, {"tp": 2, "pp": 2}, {"parallel__dp": 2}, BUCKETS),
    "llama tp2 distributed": Case("llama", 2, {"tp": 2}, {"parallel__dp": 2}, RESHARDABLE),
    "llama pp2": Case("llama", 2, {"pp": 2}, {"parallel__tp": 2}),
    "llama dp2 distributed": Case("llama", 2, {}, {"parallel__pp": 2, "parallel__vpp": 2}, RESHARDABLE),
    "llama tp2 dp2 buckets": Case("llama", 4, {"tp": 2}, {"parallel__pp": 2}, BUCKETS),
    "windows pp2": Case("windows", 2, {"pp": 2}, {"parallel__tp": 2}, RESHARDABLE),
    "mixture pp2": Case("mixture", 2, {"pp": 2}, {"parallel__dp": 2, "parallel__ep": 2}),
    "mixture ep2 distributed": Case("mixture", 2, {"ep": 2}, {"parallel__pp": 2}, RESHARDABLE, {"pp": 2}),
}


def weights_of(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of all weights."""
    place = Location(str(checkpoint))
    saved = manifest.read(place)
    names = [name for name in saved.tensors if name.startswith(WEIGHTS)]
    return {name: offline.read_tensor(place, saved, name).numpy().tobytes() for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_both_go_on_as_megatron_core_does(name: str, tmp_path: Path) -> None:
    case, tokens = CASES[name], draw_tokens()
    task = Task(ARGUMENTS[case.model], tokens, case.layout, case.distributed, save=tmp_path / "theirs")
    theirs: list[Outcome] = run_world(case.world, run, task)
    losses = theirs[-1].losses[5:]
    assert len(set(losses)) == 5

    from_megatron(tmp_path / "theirs", tmp_path / "ours")
    config = config_of(ours(MODELS[case.model], tmp_path, tmp_path / "ours", **case.here), tmp_path, world=2)
    assert run_world(2, go_on, config, tokens)[0] == pytest.approx(losses, abs=1e-5)

    from_megatron(tmp_path / "theirs" / LEGACY, tmp_path / "legacy")
    assert weights_of(tmp_path / "legacy") == weights_of(tmp_path / "ours")

    to_megatron(Location(str(tmp_path / "ours")), tmp_path / "back")
    layout = case.layout if case.back is None else case.back
    back = replace(task, layout=layout, distributed=RESHARDABLE, save=None, load=tmp_path / "back")
    again: list[Outcome] = run_world(case.world, run, back)
    assert again[-1].losses == pytest.approx(losses, abs=1e-6)
    for before, after in zip(theirs, again, strict=True) if layout == case.layout else ():
        assert before.state.keys() == after.state.keys()
        for parameter, states in before.state.items():
            for state, tensor in states.items():
                assert np.array_equal(after.state[parameter][state].ravel(), tensor.ravel()), (parameter, state)


@pytest.mark.slow
def test_the_rate_goes_on_after_the_warm_up(tmp_path: Path) -> None:
    """The settings of the schedule are those that import-config writes."""
    tokens, least = draw_tokens(), LR / 10
    flags: dict[str, Any] = {"lr_warmup_iters": [2], "lr_decay_iters": [STEPS], "min_lr": [least]}
    made = import_arguments("Megatron-LM", flags | {"lr_decay_style": ["cosine"]})
    schedule = least, 2 * SAMPLES, STEPS * SAMPLES, "cosine"
    task = Task(ARGUMENTS["llama"], tokens, {"tp": 2}, RESHARDABLE, schedule, save=tmp_path / "theirs")
    theirs: list[Outcome] = run_world(2, run, task)
    from_megatron(tmp_path / "theirs", tmp_path / "ours")
    settings = ours(MODELS["llama"], tmp_path, tmp_path / "ours", parallel__dp=2)
    settings["optimizer"] |= {key: made.settings[f"optimizer.{key}"] for key in SCHEDULE}
    config = config_of(settings, tmp_path, world=2)
    assert run_world(2, go_on, config, tokens)[0] == pytest.approx(theirs[-1].losses[5:], abs=1e-5)
