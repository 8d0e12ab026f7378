"""A batch without labels: its step is not applied and told of, the same in every layout, and the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.core.errors import ConfigError, Exit, NoLossTokensError
from megascale.core.rank import Rank
from megascale.train import skipped_steps
from tests.data.datasets import write_dataset
from tests.runs import GPT, build_run, config_of, settings
from tests.worlds import run_world

ALONE = Rank(0, 1, 0, "host")


def configure(folder: Path, lengths: list[int], **keys: Any) -> Any:
    """A run of two samples of 8 tokens a step, over documents of these lengths in their order."""
    prefix = folder / "set"
    write_dataset(prefix, lengths)
    (folder / "set.json").unlink()  # its vocabulary is larger than the model
    np.save(folder / "order.npy", np.arange(len(lengths)))
    given: dict[str, Any] = {
        "data__mock": False, "data__train": str(prefix), "data__attention_mask": "document", "data__split": [1.0, 0.0],
        "data__document_order_file": str(folder / "order.npy"), "batch__global": 2, "train__steps": 4,
        "optimizer__lr": 1e-3,
    }  # fmt: skip
    model = GPT | {"vocab_size": 1000, "seq_length": 8, "num_layers": 2}
    return config_of(settings(model, folder, **(given | keys)), folder)


class Told:
    """A writer that keeps records and messages."""

    name = "a list"

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.messages: list[str] = []

    def write(self, record: Any) -> None:
        self.records.append(record)

    def write_message(self, text: str) -> None:
        self.messages.append(text)

    def close(self) -> None: ...


def trained(rank: Rank, config: Any) -> tuple[list[tuple[float, ...]], list[str], list[bool]]:
    """Train. Returns (step, loss, norm, lr, tokens so far) of the records, the warnings, and which steps left all
    weights as they were.
    """
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter
    from megascale.train.run import Hook

    run, told, same = build_run(rank, config), Told(), list[bool]()

    class Compare(Hook):
        def step_begins(self, run: Any) -> None:
            self.before = [shard.master.clone() for shard in run.optimizer.shards]

        def step_ends(self, run: Any, result: Any) -> None:
            pairs = zip(self.before, run.optimizer.shards, strict=True)
            same.append(all(bool((old == shard.master).all()) for old, shard in pairs))

    run.hooks.add(Compare())
    assert train(run, Reporter(config, run.device, None, [told], run.mesh.recorder)) == Exit.OK
    assert run.progress.step == config.train.steps and run.progress.samples == 2 * config.train.steps
    found = [(r.step, r.loss, r.grad_norm, r.lr, r.loss_tokens) for r in told.records if hasattr(r, "loss")]
    return found, [text for text in told.messages if text.startswith("WARNING: step")], same


LENGTHS = [16, *[1] * 17, 50]
"""Samples 2 and 3 are of documents of one token."""

WARNING = (
    "WARNING: step 2 was not applied: no label of its samples 2 to 3 counts in the loss; data.skip_samples = [[2, 4]] "
    "leaves them out of another run"
)


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__dp": 2, "parallel__zero": 2},
        {"parallel__pp": 2},
        pytest.param({"parallel__tp": 2, "parallel__pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_batch_without_labels_is_skipped_and_told_of_in_every_layout(layout: dict[str, Any], tmp_path: Path) -> None:
    rows, warnings, same = trained(ALONE, configure(tmp_path / "alone", LENGTHS))
    assert [row[0] for row in rows] == [1, 3, 4] and same == [False, True, False, False]
    assert [row[4] for row in rows] == [15, 30, 46], "the labels of tokens 15 and 32 begin a document"
    assert warnings == [WARNING]
    config = configure(tmp_path / "world", LENGTHS, **layout)
    for found, told, unchanged in run_world(config.world_size, trained, config):
        assert found == [pytest.approx(row, rel=1e-10) for row in rows]
        assert (told, unchanged) == (warnings, same)


def test_the_warning_counts_samples_as_data_skip_does(tmp_path: Path) -> None:
    _, warnings, _ = trained(ALONE, configure(tmp_path, [16, *[1] * 33, 50], data__skip_samples=[[3, 5]]))
    assert "no label of its samples 2 to 5 counts in the loss; data.skip_samples = [[2, 6]]" in warnings[0]
    _, warnings, _ = trained(ALONE, configure(tmp_path / "b", [16, *[1] * 33, 50], data__skip_samples=[[2, 6]]))
    assert warnings == []


def test_a_run_whose_first_steps_all_have_no_label_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipped_steps, "MOST_WITHOUT_LABELS", 3)
    with pytest.raises(NoLossTokensError, match="no label of the first 3 steps counts in the loss"):
        trained(ALONE, configure(tmp_path, [*[1] * 65, 2]))


def test_data_without_any_label_are_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="set: none of the 65 documents has a second token, so that there is no label"
    ):
        configure(tmp_path, [1] * 65)
    assert configure(tmp_path, [1] * 65, data__eod_mask_loss=False), "a document's first token is a label then"
    assert configure(tmp_path, [0] * 64 + [65])


def test_an_evaluation_without_labels_says_what_to_change(tmp_path: Path) -> None:
    write_dataset(tmp_path / "valid", [*[1] * 900, 2])  # shuffled: the first samples are of one token each
    (tmp_path / "valid.json").unlink()
    valid = {"data__valid": str(tmp_path / "valid"), "train__eval_every": 2, "train__eval_steps": 1}
    config = configure(tmp_path, LENGTHS, **valid)
    with pytest.raises(NoLossTokensError, match="no label of the 1 validation batches counts in the loss"):
        trained(ALONE, config)
