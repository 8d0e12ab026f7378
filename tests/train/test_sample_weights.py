"""Weights of samples in the loss: its weighted mean, in every layout, by a function from outside the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.catalog.data import SAMPLE_WEIGHTS
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.core.rank import Rank
from megascale.core.registry import Card
from megascale.data.mix.label_weights import weigh_labels
from tests.data.datasets import mixture_of, write_dataset
from tests.docs.test_extending import install
from tests.runs import GPT, build_run, config_of, settings
from tests.worlds import run_world

ALONE = Rank(0, 1, 0, "host")


def configure(data: Path, folder: Path, **keys: Any) -> RunConfig:
    given = {
        "data__mock": False, "data__train": str(data / "set"), "data__split": [1.0, 0.0], "optimizer__lr": 1e-3,
        "data__sample_weight": "parity",
    }  # fmt: skip
    model = GPT | {"vocab_size": 400, "seq_length": 8, "num_layers": 2}
    return config_of(settings(model, folder, **(given | keys)), folder)


def parity(sample: int, dataset: str, tokens: np.ndarray) -> Any:
    """A weight for every other sample, and weights for the labels of the others."""
    return 0.25 if sample % 2 else np.linspace(0.5, 2, len(tokens) - 1)


class ParityCard(Card):
    def load(self) -> Any:
        return parity


PARITY = ParityCard("parity", "", "")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a dataset, with the weights `parity` registered."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(SAMPLE_WEIGHTS.__dict__, "cards", SAMPLE_WEIGHTS.cards | {"parity": PARITY})
    write_dataset(tmp_path / "set", [30, 17, 41, 9] * 4)
    (tmp_path / "set.json").unlink()  # the description has a larger vocabulary than the model
    return tmp_path


def curve(rank: Rank, config: RunConfig) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, sum of weights) of three steps."""
    from megascale.train.step import train_step

    SAMPLE_WEIGHTS.cards["parity"] = PARITY
    run, found = build_run(rank, config), []
    for _ in range(3):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        found.append((result.loss, result.grad_norm, result.totals["tokens"]))
    run.buffers.finish_param_gather()
    run.train_loader.close()
    return found


def test_the_loss_is_the_weighted_mean(data: Path) -> None:
    """Of the losses of single labels, each measured alone by a weight of one."""
    config = configure(data, data / "runs", batch__global=2)
    losses = {}
    for sample in range(2):
        for label in range(8):

            def single(index: int, dataset: str, tokens: np.ndarray, chosen: Any = (sample, label)) -> np.ndarray:
                return np.array([(index, place) == chosen for place in range(len(tokens) - 1)], dtype=np.float64)

            class SingleCard(Card):
                def load(self, weigh: Any = single) -> Any:
                    return weigh

            SAMPLE_WEIGHTS.cards["single"] = SingleCard("single", "", "")
            alone = configure(data, data / "one", batch__global=2, data__sample_weight="single")
            from megascale.train.step import train_step

            run = build_run(ALONE, alone)
            losses[sample, label] = train_step(run, run.train_loader.batch(0)).loss
    weights = {(s, n): float(np.broadcast_to(parity(s, "", np.zeros(9)), 8)[n]) for s in range(2) for n in range(8)}
    expected = sum(weights[key] * loss for key, loss in losses.items()) / sum(weights.values())
    (loss, _, total), *_ = curve(ALONE, config)
    assert loss == pytest.approx(expected, rel=1e-7) and total == pytest.approx(sum(weights.values()), rel=1e-7)


def test_weights_see_every_label(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(sample: int, dataset: str, tokens: np.ndarray) -> np.ndarray:
        seen.append(tokens)
        return (tokens[1:] % 2).astype(np.float32)

    monkeypatch.setattr(ParityCard, "load", lambda self: look)
    sample = mixture_of(configure(data, data / "runs"))[0]
    assert seen[0].tolist() == [*sample.tokens.tolist(), int(sample.labels[-1])]
    assert sample.mask is not None and sample.mask.tolist() == (sample.labels % 2).tolist()


def test_loss_tokens_are_the_sum_of_weights(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a few samples with small weights has less than one: not none."""
    from megascale.train.step import train_step

    monkeypatch.setattr(ParityCard, "load", lambda self: lambda sample, dataset, tokens: 0.03)
    run = build_run(ALONE, configure(data, data / "runs", batch__global=2))
    for step in (1, 2):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        assert result.loss_tokens == pytest.approx(16 * 0.03, rel=1e-6)
        assert run.progress.tokens == pytest.approx(step * 16 * 0.03, rel=1e-6)


def test_equal_weights_are_an_identical_run(data: Path) -> None:
    weighted = configure(data, data / "runs", data__sample_weight="equal")
    plain = weighted.model_copy(update={"data": weighted.data.model_copy(update={"sample_weight": None})})
    assert curve(ALONE, weighted) == curve(ALONE, plain)


def test_weights_leave_out_what_the_mask_does_and_evaluations_have_none(data: Path) -> None:
    keys = {"data__attention_mask": "document", "data__split": [0.5, 0.5]}
    config = configure(data, data / "runs", **keys)
    weighted, plain = (
        mixture_of(config),
        mixture_of(configure(data, data / "b", **keys, data__sample_weight="equal")),
    )
    for index in range(12):
        found, mask = weighted[index].mask, plain[index].mask
        assert found is not None and mask is not None and found.dtype == np.float32
        assert found.tolist() == (np.float32(parity(index, "", np.zeros(9))) * mask).tolist()
    valid = mixture_of(config, "valid")[0].mask
    assert valid is None or valid.dtype != np.float32


@pytest.mark.parametrize("weights", [-1.0, float("nan"), np.ones(7), np.array([1.0] * 7 + [-1])])
def test_weights_that_cannot_be_used_are_one_line(weights: Any) -> None:
    with pytest.raises(DataError, match=r"data\.sample_weight has found weights for sample 5 in shape"):
        weigh_labels(lambda *_: weights, "plug_in", 5, "a", np.zeros(9), None)


def test_an_error_of_the_plug_in_is_one_line_that_names_its_place(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sample: int, dataset: str, tokens: np.ndarray) -> Any:
        return 1.0 if sample < 2 else dict[str, float]()["weight"]

    monkeypatch.setattr(ParityCard, "load", lambda self: broken)
    samples = mixture_of(configure(data, data / "runs"))
    assert samples[1].mask is not None
    with pytest.raises(DataError, match=r"= parity fails for sample 2, from \S+/set: KeyError: 'weight'") as raised:
        samples[2]
    assert f"see {__file__}:" in raised.value.hint and "\n" not in str(raised.value)
    monkeypatch.setattr(ParityCard, "load", lambda self: lambda *arguments: "heavy")
    with pytest.raises(DataError, match="= parity fails for sample 0, from"):
        mixture_of(configure(data, data / "runs"))[0]


def test_the_example_weighs_samples(data: Path) -> None:
    module = install("sample_weight", data)
    samples = mixture_of(configure(data, data / "runs", data__sample_weight="variety"))
    assert samples[0].mask.tolist() == [1] * 8
    assert module.variety(100_000, "", np.array([1, 1, 2, 2])) == 0.5


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__dp": 2, "data__reader": "rank"},
        pytest.param({"parallel__tp": 2, "parallel__pp": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2, "batch__micro": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_every_layout_has_the_same_loss(layout: dict[str, Any], data: Path) -> None:
    expected, config = curve(ALONE, configure(data, data / "runs")), configure(data, data / "world", **layout)
    for found in run_world(config.world_size, curve, config):
        assert found == [pytest.approx(step, rel=1e-10) for step in expected]
