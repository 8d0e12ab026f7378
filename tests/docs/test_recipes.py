"""The configuration of docs/recipes.md, which extends a file of configs/gpu, and the runs of its table."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megascale.config.loading import load_config
from megascale.data.read import indexed_dataset
from tests.data.datasets import write_documents
from tools import recipes

ROOT = Path(__file__).parents[2]


def test_every_run_of_configs_gpu_has_a_row() -> None:
    assert {f"{recipe.name}.toml" for recipe in recipes.RECIPES} == {
        path.name for path in (ROOT / "configs/gpu").glob("*.toml")
    } - {"base.toml"}


def test_the_readme_has_the_same_figures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)\.toml` \| .* \| ([\d.]+) s \| ([\d.]+%) \|$", text, re.MULTILINE)
    table = {cells[0]: (cells[4], cells[7]) for cells in map(cells_of, recipes.table())}
    assert len(rows) == 4
    for name, step, causal in rows:
        assert table[f"`{name}.toml`"] == (step, causal)


def cells_of(line: str) -> list[str]:
    """The cells of a line of a table, at least ten."""
    return [*(cell.strip() for cell in line.strip("|").split("|")), *[""] * 10]


def test_the_run_that_extends_a_recipe_saves_and_trains_on_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml, *_ = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/recipes.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/gpu").symlink_to(ROOT / "configs/gpu")
    (tmp_path / "configs/my-8b.toml").write_text(toml, encoding="utf-8")
    (tmp_path / "mine").mkdir()
    tokenizer = indexed_dataset.TokenizerInfo("bytes", "bytes", 256)
    for split in ("train", "valid"):
        write_documents(tmp_path / "mine" / split, [np.zeros(20_000, np.int32)] * 60, tokenizer, 257)
        (tmp_path / "mine" / f"{split}.json").unlink()
    (tmp_path / "mine/tokenizer.json").touch()
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/my-8b.toml", world_size=64)
    assert not config.data.mock
    assert config.checkpoint.every and config.checkpoint.every < config.train.steps
    assert config.optimizer.warmup_steps > 100
