"""What changes the order of samples of a run that resumes is said; what does not, is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.data.mix.order_changes import order_changes
from tests.data.datasets import data_config, mixture_of, write_dataset

LENGTHS = [13, 5, 1, 40, 8, 9, 30, 2, 21]


def dumped(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def sources(folder: Path, *names: str) -> list[tuple[float, Path]]:
    return [(0.5, folder / name) for name in names]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"train__seed": 99}, "train.seed"),
        ({"packing": "best_fit"}, "data.packing"),
        ({"data__split": [0.5, 0.5]}, "data.split"),
        ({"seq_length": 4}, "model.seq_length"),
        ({"train": "ba"}, "data.train"),
        ({"data__split": [2.0, 0.0]}, None),
        ({"train__steps": 99, "batch__global": 16, "optimizer__lr": 0.5}, None),
    ],
)
def test_a_change_that_moves_samples_is_said(change: dict[str, Any], key: str | None, tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", LENGTHS)
    write_dataset(tmp_path / "b", LENGTHS, first=1000)
    change = dict(change)
    names = change.pop("train", "ab")
    before = data_config(tmp_path, sources(tmp_path, "a", "b"))
    model = {"seq_length": change.pop("seq_length", before.model.seq_length)}
    data = {"packing": change.pop("packing", "concat")}
    now = data_config(tmp_path, sources(tmp_path, *names), **change)
    update = {"model": now.model.model_copy(update=model), "data": now.data.model_copy(update=data)}
    now = now.model_copy(update=update)
    said = list(order_changes(dumped(before), dumped(now)))
    assert len(said) == (key is not None)
    first, second = (mixture_of(config) for config in (before, now))
    assert any(first[n].tokens.tolist() != second[n].tokens.tolist() for n in range(20)) == bool(said)
    if key:
        assert said[0].startswith(f"{key} was ") and "reads samples again" in said[0]


def test_a_checkpoint_of_before_a_key_and_mock_data_are_silent(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", LENGTHS)
    config = data_config(tmp_path, tmp_path / "a")
    saved = dumped(config)
    for name in ("packing", "document_order_file", "split"):
        del saved["data"][name]
    assert list(order_changes(saved, dumped(config))) == []
    assert list(order_changes(saved, dumped(data_config(tmp_path, train__seed=7)))) == []


def test_another_file_of_the_order_is_said(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", LENGTHS)
    config = data_config(tmp_path, tmp_path / "a")
    saved = dumped(config)
    saved["data"]["document_order_file"] = "order.npy"
    assert [text.split(" ")[0] for text in order_changes(saved, dumped(config))] == ["data.document_order_file"]
