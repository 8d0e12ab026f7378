"""Averages of the weights: by the definition, without effect on training, in checkpoints of every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megascale.checkpoint.folders import find_checkpoint
from megascale.checkpoint.format import manifest
from megascale.checkpoint.offline import write_state
from megascale.cli.main import main
from megascale.config.model import ModelConfig
from megascale.convert.conversion import to_huggingface
from megascale.convert.saved_weights import SavedWeights, average_of_weights
from megascale.convert.tensor_map import model_tensors
from megascale.core.errors import Exit
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.train.evaluate import evaluate
from megascale.train.resume import load_initial_state
from megascale.train.step import train_step
from tests.optim.layouts import SMALL, configuration
from tests.runs import build_run
from tests.worlds import run_world

EMA = {"train__weight_average": "ema", "train__weight_average_decay": 0.5, "train__weight_average_every": 2}
LAWA = {"train__weight_average": "lawa", "train__weight_average_count": 2, "train__weight_average_every": 2}
STEPS = 7


def kept(rank: Rank, config: Any, *others: Any) -> tuple[dict[str, Any], list[tuple[str, bool]]]:
    """Train and save. Return the average as lists, what runs with other averages say, and if those have begun."""
    run = build_run(rank, config)
    for _ in range(STEPS):
        train_step(run, run.train_loader.batch(run.progress.samples))
        run.average.update(run.progress.step)
    run.checkpoints.save(run.progress)
    with run.average.in_place_of_weights(run.buffers):
        tensors = run.optimizer.global_tensors()
        weights = {name: shard.data.tolist() for name, tensor in tensors.items() for shard in tensor.shards}
    said = []
    for other in others:
        resumed = build_run(rank, other, run.mesh)
        text = load_initial_state(resumed, lambda folder: pytest.fail(str(folder)))
        said.append((text, resumed.average.has_begun))
    return weights, said


def test_an_average_is_exported_and_another_one_begins_anew(tmp_path: Path) -> None:
    keys = {"checkpoint__every": 100, "train__precision": "fp32"}
    config, same, fewer, ema = (
        configuration(tmp_path, {"name": "adamw"}, SMALL, **keys, **LAWA | changes)
        for changes in (
            {},
            {"train__weight_average_every": 3},
            {"train__weight_average_count": 1},
            {"train__weight_average": "ema", "train__weight_average_count": 5},
        )
    )
    ((weights, said),) = run_world(1, kept, config, same, fewer, ema)
    assert [("average of the weights begins anew" in text, begun) for text, begun in said] == [
        (False, True), (True, False), (True, False),
    ]  # fmt: skip
    source = find_checkpoint(Location(str(config.folder)))
    average = average_of_weights(source, manifest.read(source))
    now = SavedWeights(source, manifest.read(source))
    for tensor in model_tensors(config.model):
        exported = average.read(tensor.name)
        assert torch.equal(exported, torch.tensor(weights[f"weights.{tensor.name}"]).view(tensor.shape))
        assert not torch.equal(exported, now.read(tensor.name))
    for options in ((), ("--average",)):
        assert main(["ckpt", "convert", str(config.folder), str(tmp_path / f"hf{len(options)}"), *options]) == 0
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("hf1", "hf0"))
    assert theirs.keys() == ours.keys() and not any(torch.equal(theirs[name], ours[name]) for name in ours)


@pytest.mark.parametrize("verb", ["convert", "sample"])
def test_no_average_is_refused(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a checkpoint without one, and of Hugging Face weights."""
    model = ModelConfig.model_validate(SMALL)
    (tmp_path / "ours").mkdir()
    weights = ((f"weights.{tensor.name}", torch.zeros(tensor.shape)) for tensor in model_tensors(model))
    write_state(tmp_path / "ours", weights, {"model": model.model_dump(mode="json", by_alias=True)})
    to_huggingface(Location(str(tmp_path / "ours")), tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        output = [str(tmp_path / "out")] if verb == "convert" else []
        arguments = ["ckpt", "convert"] if verb == "convert" else ["sample"]
        assert main([*arguments, str(tmp_path / folder), *output, "--average"]) == Exit.CHECKPOINT
        assert "has no average of the weights" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def averaged(rank: Rank, config: Any) -> tuple[float, bool, bool, list[float]]:
    """Train with an average. Return its largest difference from the average of kept weights, if an evaluation of the
    average leaves weights and losses as they were, if a resumed run has the same average, and the average's losses.
    """

    def step(run: Any) -> float:
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        run.average.update(run.progress.step)
        return result.loss

    run, kept, losses = build_run(rank, config), [], []
    for _ in range(STEPS):
        losses.append(step(run))
        kept.append([shard.master.clone() for shard in run.optimizer.shards])
        if run.progress.step == 5:
            run.checkpoints.save(run.progress)
    second, fourth, sixth = kept[1], kept[3], kept[5]
    if config.train.weight_average == "ema":
        expected = [0.25 * a + 0.25 * b + 0.5 * c for a, b, c in zip(second, fourth, sixth, strict=True)]
    else:
        expected = [(b + c) / 2 for b, c in zip(fourth, sixth, strict=True)]
    means = [run.average.mean(shard) for shard in run.average._shards]
    worst = max(float((mean - right).abs().max()) for mean, right in zip(means, expected, strict=True))
    before = evaluate(run).valid_loss
    with run.average.in_place_of_weights(run.buffers):
        average_loss = evaluate(run).valid_loss
    same = evaluate(run).valid_loss == before and average_loss != before
    same = same and all(torch.equal(s.master, old) for s, old in zip(run.optimizer.shards, kept[-1], strict=True))
    again = build_run(rank, config, run.mesh)
    load_initial_state(again, lambda folder: pytest.fail(str(folder)))
    continued = [step(again) for _ in range(STEPS - 5)] == losses[5:]
    again_means = [again.average.mean(shard) for shard in again.average._shards]
    resumed = all(torch.equal(a, b) for a, b in zip(means, again_means, strict=True))
    return worst, same, continued and resumed, [before, average_loss]


LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp2 zero0": {"parallel__dp": 2, "parallel__zero": 0},
    "pp2": {"parallel__pp": 2},
    "tp2 dp2 zero0": {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 0},
    "pp2 dp2": {"parallel__pp": 2, "parallel__dp": 2},
}
QUICK = (("dp2 zero0", "ema"), ("pp2", "lawa"))
CASES = [
    pytest.param(layout, average, marks=[] if (name, kind) in QUICK else pytest.mark.slow, id=f"{name} {kind}")
    for name, layout in LAYOUTS.items()
    for kind, average in (("ema", EMA), ("lawa", LAWA))
]


@pytest.mark.parametrize(("layout", "average"), CASES)
def test_an_average(layout: dict[str, Any], average: dict[str, Any], tmp_path: Path) -> None:
    precision = "bf16" if "parallel__pp" in layout else "fp64"
    keys = {"checkpoint__every": 100, "train__eval_every": 100, "train__eval_steps": 1, "train__precision": precision}
    keys["batch__global"] = 4
    config = configuration(tmp_path, {"name": "adamw"}, SMALL, **keys, **average, **layout)
    for worst, same, resumed, _ in run_world(config.world_size, averaged, config):
        assert worst < (1e-14 if precision == "fp64" else 1e-6)
        assert same and resumed
