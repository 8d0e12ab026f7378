"""The layers with FP8 GEMMs follow from the configuration alone: from the recipe's card unless they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.cli.check_summary import summary
from megascale.config.run import RunConfig
from megascale.layout.chunks import fp8_layers
from tests.runs import LLAMA, config_of, settings

MODEL = LLAMA | {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 64, "seq_length": 32}


def resolved(folder: Path, layers: int, recipe: str, **more: Any) -> RunConfig:
    more = {"train__precision": "fp8", "fp8__recipe": recipe, **more}
    return config_of(settings(MODEL | {"num_layers": layers}, folder, **more), folder).resolve(None)


def layers_of(config: RunConfig) -> range:
    return fp8_layers(config.model, config.train, config.fp8)


@pytest.mark.parametrize(
    ("layers", "recipe", "expected"),
    [
        (62, "nvfp4", range(2, 54)),  # of the model of 12B parameters of NVIDIA's paper
        (32, "nvfp4", range(1, 28)),
        (33, "nvfp4", range(2, 28)),
        (4, "nvfp4", range(1, 3)),
        (32, "mxfp8", range(1, 31)),
        (32, "tensorwise", range(1, 31)),
    ],
)
def test_a_recipe_has_its_layers_in_bf16(layers: int, recipe: str, expected: range, tmp_path: Path) -> None:
    config = resolved(tmp_path, layers, recipe)
    assert layers_of(config) == expected
    assert (config.fp8.first_layers_bf16, config.fp8.last_layers_bf16) == (expected.start, layers - expected.stop)


def test_given_layers_stay_in_bf16(tmp_path: Path) -> None:
    assert layers_of(resolved(tmp_path, 32, "nvfp4", fp8__last_layers_bf16=2)) == range(1, 30)
    assert layers_of(resolved(tmp_path, 32, "nvfp4", fp8__first_layers_bf16=0)) == range(28)


@pytest.mark.parametrize("more", [{"parallel__pp": 4}, {"parallel__pp": 2, "parallel__vpp": 4}])
def test_no_pipeline_changes_the_layers(more: dict[str, Any], tmp_path: Path) -> None:
    assert layers_of(resolved(tmp_path, 32, "nvfp4", **more)) == range(1, 28)


def test_check_names_the_layers_and_what_follows(tmp_path: Path) -> None:
    text = summary(resolved(tmp_path, 32, "nvfp4", fp8__schedule=[[0.82, "bf16"]]))
    assert "layers 1 to 27 of 0 to 31 run nvfp4, bf16 from 82% on" in text
