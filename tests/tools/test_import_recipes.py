"""The tool finds recipes and scripts, and counts every argument once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import import_recipes
import results

RECIPE = "tests/functional_tests/test_cases/gpt/small/model_config.yaml"


def test_a_page_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        RECIPE: "MODEL_ARGS:\n  --num-layers: 4\n  --bf16: true\n  --squared-relu: true\n  --num-workers: $WORKERS\n",
        "examples/run.sh": "torchrun pretrain_gpt.py --num-layers 4 --save $1 --swiglu",
        "examples/other.sh": "torchrun pretrain_t5.py --num-layers 4",
        "examples/serve.sh": "python serve.py",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "docs")
    monkeypatch.setattr(sys, "argv", ["import_recipes.py", str(tmp_path)])
    assert import_recipes.main() == 0
    page = (tmp_path / "docs/import-config.md").read_text()
    assert "3 recipes and scripts: 7 arguments, 5 mapped, 1 dropped, 1 refused." in page
    assert "| `gpt/small` | 4 | 2 | 1 | 1 |" in page and "| `examples/run` | 3 | 3 | 0 | 0 |" in page
    assert "| `examples/other` |  |  |  | trains a model of another kind |" in page
    assert "| `--squared-relu` | not supported: one of the choices of model.activation | 1 |" in page
