"""A data policy from outside the package: its weights reach the samples, and a run goes on exactly, in any layout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.catalog.data import DATA_POLICIES
from megascale.cli.data_samples import samples_of_step
from megascale.config.run import RunConfig
from megascale.core.errors import CheckpointError, ConfigError, DataError
from megascale.core.rank import Rank
from megascale.core.registry import Card
from megascale.record.metrics_writers import JsonLinesWriter
from tests.data.datasets import ORIGIN
from tests.docs.test_extending import install
from tests.marks import only_quick
from tests.runs import GPT, build_run, config_of, settings
from tests.worlds import run_world

ALONE = Rank(0, 1, 0, "host")
VOCABULARY, EVERY = 500, 4
STEPS = 16


def write_datasets(folder: Path) -> None:
    """Datasets: one always the same token, which is learned at once, and others of random tokens."""
    from tests.data.datasets import write_documents

    random = np.random.default_rng(0)
    for name in ("easy", "hard", "third"):
        documents = [np.full(40, 7) if name == "easy" else random.integers(VOCABULARY, size=40) for _ in range(60)]
        write_documents(folder / name, documents, ORIGIN, VOCABULARY)


def configure(data: Path, folder: Path, **keys: Any) -> RunConfig:
    easy, hard = str(data / "easy"), str(data / "hard")
    given = {
        "data__mock": False, "data__train": [[0.5, easy], [0.5, hard]], "data__split": [1.0, 0.0],
        "data__blend_policy": "by_loss", "data__blend_policy_every": EVERY, "data__prefetch": 1, "train__steps": STEPS,
        "optimizer__warmup_steps": 0, "optimizer__decay": "constant", "checkpoint__every": 7,
        "checkpoint__async": False,
    }  # fmt: skip
    model = GPT | {"vocab_size": VOCABULARY, "seq_length": 8, "num_layers": 2, "hidden_size": 16}
    return config_of(settings(model, folder, **(given | keys)), folder)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of datasets, with the policy of the documentation installed for all processes of these tests."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        data = tmp_path_factory.mktemp("data")
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setitem(DATA_POLICIES.__dict__, "cards", dict(DATA_POLICIES.cards))
        install("data_policy", data)
        folder = data / str(os.getpid())  # where it wrote the module
        package = folder / "my_policy-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: my_policy\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text("[megascale.data_policies]\nby_loss = my_policy:CARD\n")
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        write_datasets(data)
        yield data


Trained = tuple[list[tuple[int, float, float]], list[list[list[int]]]]
"""(step, loss, gradient norm) of steps, and the tokens of their samples on this rank."""


def trained(rank: Rank, config: RunConfig) -> Trained:
    """Train from the newest checkpoint to the end, and write metrics as a run does."""
    from megascale.train.entry import _prepare_folder
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter
    from megascale.train.resume import load_initial_state

    run = build_run(rank, config)
    load_initial_state(run, lambda _: None)  # type: ignore[arg-type]
    tokens, load = [], run.train_loader.batch

    def batch(consumed: int) -> Any:
        found = load(consumed)
        tokens.append([m.tokens.T.tolist() for m in found.micro_batches if m.tokens is not None])
        return found

    run.train_loader.batch = batch
    writers = _prepare_folder(config, run.progress.step) if rank.rank == 0 else []
    writers = [writer for writer in writers if isinstance(writer, JsonLinesWriter)]
    first = run.progress.step
    train(run, Reporter(config, run.device, None, writers, run.mesh.recorder))
    curve = [(r["step"], r["loss"], r["grad_norm"]) for r in records(config, "loss") if r["step"] > first]
    return curve, tokens


def records(config: RunConfig, key: str) -> list[dict[str, Any]]:
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if key in record]


def updates(config: RunConfig) -> list[dict[str, Any]]:
    return [{key: r.get(key) for key in ("step", "place", "mixture")} for r in records(config, "mixture")]


def weights_of(update: dict[str, Any]) -> list[float]:
    return [numbers["weight"] for numbers in update["mixture"].values()]


def test_weights_follow_the_losses_and_samples_the_weights(policies: Path, tmp_path: Path) -> None:
    config = configure(policies, tmp_path / "runs")
    _, tokens = trained(ALONE, config)
    found = updates(config)
    assert [update["step"] for update in found] == [4, 8, 12, 16]
    assert [update["place"] for update in found] == [8 * (update["step"] + 2) for update in found]
    assert [list(update["mixture"]) for update in found] == 4 * [["0 easy", "1 hard"]]
    assert weights_of(found[-1])[1] > 0.9, "the dataset with the higher loss"
    for step in range(1, STEPS + 1):
        samples = samples_of_step(config, step)
        easy = [sample.dataset.endswith("easy") for sample in samples]
        assert [set(row[0]) == {7} for row in tokens[step - 1]] == easy, "as `megascale data samples` tells"
    late = [sample.dataset for step in range(12, STEPS) for sample in samples_of_step(config, step)]
    assert sum(name.endswith("hard") for name in late) > 0.75 * len(late)


def test_losses_by_dataset_are_those_of_its_samples(policies: Path, tmp_path: Path) -> None:
    """The first update has the mean of the losses of a dataset's micro-batches, which here are known apart."""
    config = configure(policies, tmp_path / "runs", train__steps=EVERY, data__blend_policy_every=EVERY)
    run = build_run(ALONE, config)
    losses: dict[bool, list[float]] = {True: [], False: []}
    add = run.pipeline.on_loss

    def on_loss(index: int, micro_batch: Any, loss: Any) -> None:
        losses[bool((micro_batch.tokens == 7).all())].append(float(loss) / 8)
        add(index, micro_batch, loss)

    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    run.pipeline.on_loss = on_loss
    config.folder.mkdir(parents=True)
    writer = JsonLinesWriter(config.folder / "metrics.jsonl", 0)
    train(run, Reporter(config, run.device, None, [writer], run.mesh.recorder))
    (update,) = updates(config)
    expected = [np.mean(losses[True]), np.mean(losses[False])]
    assert [numbers["loss"] for numbers in update["mixture"].values()] == pytest.approx(expected)


def test_fixed_weights_are_an_identical_run(policies: Path, tmp_path: Path) -> None:
    first, tokens = trained(ALONE, configure(policies, tmp_path / "a", data__blend_policy="fixed"))
    plain = configure(policies, tmp_path / "b")
    data = plain.data.model_copy(update={"blend_policy": None, "blend_policy_every": None})
    again, same = trained(ALONE, plain.model_copy(update={"data": data}))
    assert first == again and tokens == same and len(first) == STEPS


@pytest.fixture(scope="module")
def uninterrupted(policies: Path) -> tuple[Trained, list[dict[str, Any]]]:
    """A run of all steps in one go, and its updates."""
    config = configure(policies, policies / "whole")
    return trained(ALONE, config), updates(config)


def test_a_resume_goes_on_exactly(policies: Path, uninterrupted: Any, tmp_path: Path) -> None:
    """From step 14: within a period, and between the update after step 12 and its weights."""
    (whole, tokens), expected = uninterrupted
    trained(ALONE, configure(policies, tmp_path / "runs", train__steps=14))
    longer = configure(policies, tmp_path / "runs")
    assert trained(ALONE, longer) == (whole[14:], tokens[14:])
    assert updates(longer) == expected


@pytest.mark.slow
def test_an_update_waits_until_the_weights_before_it_are_read(policies: Path, tmp_path: Path) -> None:
    """After a resume with shorter periods: without the wait, samples before the new weights would be forgotten."""
    keys = {"data__prefetch": 6, "data__blend_policy_every": 8}
    trained(ALONE, configure(policies, tmp_path / "runs", **keys, train__steps=8))
    config = configure(policies, tmp_path / "runs", data__prefetch=1, data__blend_policy_every=3)
    trained(ALONE, config)
    assert [(update["step"], update["place"]) for update in updates(config)] == [(8, 120), (15, 136)]


def test_a_run_keeps_a_policy_and_its_datasets(policies: Path, tmp_path: Path) -> None:
    trained(ALONE, configure(policies, tmp_path / "runs", train__steps=7))
    config = configure(policies, tmp_path / "runs")
    data = config.data.model_copy(update={"blend_policy": None, "blend_policy_every": None})
    with pytest.raises(ConfigError, match="by_loss has changed the weights of the blend so far"):
        trained(ALONE, config.model_copy(update={"data": data}))
    with pytest.raises(CheckpointError, match=r"data_policy\.mixture has 12 numbers in the checkpoint, and 17"):
        more = [[0.5, str(policies / name)] for name in ("easy", "hard", "third")]
        trained(ALONE, configure(policies, tmp_path / "runs", data__train=more))
    kept, _ = trained(ALONE, configure(policies, tmp_path / "runs", data__blend_policy="fixed"))
    assert len(kept) == STEPS - 7


BAD_WEIGHTS = [[1.0], [1.0, float("nan")], [1.0, -1.0], [0.0, 0.0]]


@pytest.mark.parametrize("answer", only_quick(BAD_WEIGHTS, [1.0, -1.0]))
def test_weights_that_cannot_be_used_end_the_run(policies: Path, tmp_path: Path, answer: list[float]) -> None:
    class Odd:
        def __init__(self, weights: np.ndarray) -> None:
            self.state = np.zeros(0)

        def update(self, report: Any) -> list[float]:
            return answer

    class OddCard(Card):
        def load(self) -> Any:
            return Odd

    DATA_POLICIES.cards["odd"] = OddCard("odd", "", "")
    with pytest.raises(DataError, match=r"the data policy odd has found .* after step 4: not 2 weights of 0 or above"):
        trained(ALONE, configure(policies, tmp_path / "runs", data__blend_policy="odd"))


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"data__train": "easy"}, "data.blend_policy", "changes the weights of a blend, and data.train is none"),
        ({"data__blend_schedule": [[8, [1, 2]]]}, "data.blend_policy", "and data.blend_schedule both change"),
        ({"data__prefetch": 3}, "data.blend_policy_every", "4 is below prefetch + 2"),
        (
            {"batch__micro": 2},
            "data.blend_policy",
            "by_loss uses the losses by dataset, and a micro-batch of 2 samples",
        ),
        (
            {"data__packing": "decompose", "data__attention_mask": "document", "data__decompose_min_length": 2},
            "data.blend_policy",
            "cannot change the weights with packing = decompose",
        ),
    ],
)
def test_rules(policies: Path, tmp_path: Path, keys: dict[str, Any], key: str, message: str) -> None:
    if "data__train" in keys:
        keys = {"data__train": str(policies / "easy")}
    with pytest.raises(ConfigError) as error:
        configure(policies, tmp_path / "runs", **keys)
    assert key in str(error.value) and message in str(error.value)


def test_a_period_without_a_policy_has_no_effect(policies: Path, tmp_path: Path) -> None:
    config = configure(policies, tmp_path / "runs")
    text = (tmp_path / "runs" / "config-in.toml").read_text().replace('blend_policy = "by_loss"', "")
    (tmp_path / "config.toml").write_text(text)
    assert config.data.blend_policy
    with pytest.raises(ConfigError, match=r"data.blend_policy_every.*has no effect without a policy"):
        from megascale.config.loading import load_config

        load_config(str(tmp_path / "config.toml"), [])


LAYOUTS = {
    "dp2, host": {"parallel__dp": 2, "data__reader": "host"},
    "tp2 pp2": {"parallel__tp": 2, "parallel__pp": 2},
    "cp2 dp2, host": {"parallel__cp": 2, "parallel__dp": 2, "data__reader": "host"},
    "pp2 dp2 zero2, host": {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2, "data__reader": "host"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "dp2, host" else pytest.mark.slow) for name in LAYOUTS]
)
def test_another_layout_and_reader_resumes_with_the_same_samples(
    name: str, policies: Path, uninterrupted: Any, tmp_path: Path
) -> None:
    (whole, _), expected_updates = uninterrupted
    trained(ALONE, configure(policies, tmp_path / "runs", train__steps=7))
    config = configure(policies, tmp_path / "runs", **LAYOUTS[name])
    ((curve, _), *_) = run_world(config.world_size, trained, config)
    for (_, loss, norm), (_, expected, expected_norm) in zip(curve, whole[7:], strict=True):
        assert loss == pytest.approx(expected, rel=1e-10) and norm == pytest.approx(expected_norm, rel=1e-8)
    plain = [(u["step"], u["place"], weights_of(u)) for u in expected_updates]
    assert [(u["step"], u["place"], weights_of(u)) for u in updates(config)] == plain
