"""A GPU trains what a CPU trains, and every backend that would serve computes its operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.catalog.backends import BACKENDS
from megascale.catalog.recipes import RECIPES
from megascale.cli.doctor import configs_to_check
from megascale.core.rank import Rank
from tests.gpu.conftest import Figure
from tests.gpu.machine import curve_on, device_of, furthest, world_of
from tests.runs import FAMILIES, LLAMA, config_of, settings, train_curve
from tests.worlds import run_world

pytestmark = pytest.mark.gpu(1)

STEPS = 10
FULL: dict[str, Any] = {"train__memory": ["full"]}
WIDE = LLAMA | {"hidden_size": 256, "ffn_size": 512, "vocab_size": 512, "seq_length": 128, "num_layers": 2}


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-5), ("bf16", 1e-2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_steps_are_those_of_a_cpu(
    family: str, precision: str, tolerance: float, tmp_path: Path, figure: Figure
) -> None:
    model = FAMILIES[family]
    config = config_of(settings(model, tmp_path, train__precision=precision, optimizer__lr=1e-3), tmp_path)
    (ours,), (expected,) = world_of(1, curve_on, config, STEPS), run_world(1, train_curve, config, STEPS)
    difference = furthest(ours, expected)
    figure("difference", difference)
    assert difference < tolerance


SPARSE = {"local_blocks": 1, "stride": 2, "block": 8}
MASKED: dict[str, dict[str, Any]] = {
    "documents": {"data__attention_mask": "document", "data__document_length": 50},
    "windows": {"model__window": 32},
    "sparse attention": {"model__sparse_attention": SPARSE},
    "sparse attention to documents": {
        "model__sparse_attention": SPARSE, "data__attention_mask": "document", "data__document_length": 50,
    },
    "sparse attention in chunks": {"model__sparse_attention": SPARSE, "data__sequence_chunk_tokens": 32},
    "soft caps": {"model__attention_softcap": 5.0, "model__logit_softcap": 3.0},
    "windows in chunks of documents": {
        "model__window": 24, "data__sequence_chunk_tokens": 32, "data__attention_mask": "document",
        "data__document_length": 50,
    },
    "chunks": {"data__sequence_chunk_tokens": 32, "data__sequence_chunks_saved": 2},
    "chunks of documents": {
        "data__sequence_chunk_tokens": 32, "data__sequence_chunks_saved": 2, "data__attention_mask": "document",
        "data__document_length": 50,
    },
}  # fmt: skip
"""Attention other than to whole rows, for which a GPU has other kernels."""


@pytest.mark.parametrize("case", MASKED)
def test_masked_attention_is_that_of_a_cpu(case: str, tmp_path: Path, figure: Figure) -> None:
    keys = {"train__precision": "bf16", "optimizer__lr": 1e-3, **MASKED[case]}
    config = config_of(settings(WIDE, tmp_path, **keys), tmp_path)
    (ours,), (expected,) = world_of(1, curve_on, config, STEPS), run_world(1, train_curve, config, STEPS)
    difference = furthest(ours, expected)
    figure("difference", difference)
    assert difference < 1e-2


@pytest.mark.parametrize("keys", [{"train__memory": ["full_host"]}, {**FULL, "train__mlp_tiles": 4}], ids=str)
def test_what_saves_memory_changes_no_step(keys: dict[str, Any], tmp_path: Path, figure: Figure) -> None:
    """Inputs of many blocks that travel through host memory, and an MLP in tiles, both recomputed."""
    common = {"train__precision": "fp64", "optimizer__lr": 1e-3}
    model = LLAMA | {"num_layers": 8}
    plain, saving = (config_of(settings(model, tmp_path, **common, **more), tmp_path) for more in (FULL, keys))
    (expected,), (found,) = world_of(1, curve_on, plain, STEPS), world_of(1, curve_on, saving, STEPS)
    difference = furthest(found, expected)
    figure("difference", difference)
    assert difference < 1e-10


def verdicts(rank: Rank, config: Any) -> list[tuple[str, str, bool, float | None, str | None]]:
    """Each backend that could serve: operation, name, whether it serves, its difference, what is wrong with it."""
    from dataclasses import replace

    import torch

    from megascale.ops.selftest import check_backends
    from megascale.train.op_context import op_context

    setting = op_context(config, device_of(rank))
    setting = replace(setting, attends_in_parts=setting.dtype == torch.bfloat16)
    found = []
    for operation in filter(setting.uses, BACKENDS):
        examination = check_backends(operation, setting)
        assert examination.problem is None, examination.problem
        for verdict in examination.verdicts:
            if verdict.supported:
                wrong = (verdict.error or "differs") if verdict.failed else None
                found.append((operation, verdict.backend, verdict.chosen, verdict.difference, wrong))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_backend_computes_its_operation(precision: str, figure: Figure) -> None:
    (config,) = configs_to_check(None, [f"train.precision={precision}"]).values()
    check(world_of(1, verdicts, config)[0], figure)


@pytest.mark.parametrize("recipe", RECIPES.names())
def test_fp8_gemms_are_those_of_dequantized_factors(recipe: str, tmp_path: Path, figure: Figure) -> None:
    """With a hidden size of 4096, on a GPU that has the recipe."""
    model = WIDE | {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 8192, "num_layers": 3}
    overrides = {"train__precision": "fp8", "fp8__recipe": recipe}
    config = config_of(settings(model, tmp_path, **overrides), tmp_path)
    check([each for each in world_of(1, verdicts, config)[0] if each[0] == "linear"], figure)


def check(found: list[tuple[str, str, bool, float | None, str | None]], figure: Figure) -> None:
    for operation, backend, chosen, difference, _ in found:
        if difference is not None:
            figure(f"{operation} {backend}{' (used)' if chosen else ''}", difference)
    assert [each for each in found if each[4]] == []
    assert any(chosen for _, _, chosen, _, _ in found)


@pytest.mark.parametrize("recipe", RECIPES.names())
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_not_finite_passes_fp8_casts(recipe: str, value: str, tmp_path: Path) -> None:
    overrides = {
        "train__precision": "fp8",
        "fp8__recipe": recipe,
        "fp8__first_layers_bf16": 0,
        "fp8__last_layers_bf16": 0,
    }
    config = config_of(settings(WIDE, tmp_path, **overrides), tmp_path)
    (error,) = world_of(1, spoilt_step, config, value)
    assert error.startswith("step 2: the loss is nan on rank 0")


def spoilt_step(rank: Rank, config: Any, value: str) -> str:
    """The error of a step in which one number that enters the second layer is spoilt."""
    from megascale.core.errors import DivergenceError
    from megascale.train.step import train_step
    from tests.gpu.machine import run_of

    run = run_of(rank, config)
    train_step(run, run.train_loader.batch(0))

    def spoil(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0].clone()
        x[0, 0, 0].fill_(float(value))
        return x, *inputs[1:]

    run.stages[0].layers["1"].register_forward_pre_hook(spoil)
    with pytest.raises(DivergenceError) as caught:
        train_step(run, run.train_loader.batch(8))
    return str(caught.value)
