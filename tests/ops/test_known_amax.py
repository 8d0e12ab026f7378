"""Amaxes kept with tensors: when they hold, and that casts by them are those by a pass over the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.ops import compiled, fp8, recipe, select
from megascale.ops.known_amax import (
    detach_known,
    keep_amax,
    keeping_row_amax,
    known_amax,
    known_column_amax,
    with_row_amax,
)
from tests.runs import LLAMA, config_of, settings, train_curve
from tests.worlds import run_world

X = torch.tensor([[1.0, -5.0], [3.0, 2.0]])


def test_amaxes_hold_for_a_tensor_until_it_is_changed() -> None:
    x = X.clone()
    assert known_amax(x) is None and known_column_amax(x) is None
    keep_amax(x, rows=torch.tensor([[5.0], [3.0]]))
    keep_amax(x, columns=torch.tensor([[3.0], [5.0]]))
    assert known_amax(x) == 5 and known_column_amax(x) is not None
    assert known_amax(x.clone()) is None and known_amax(x.view(-1)) is None
    apart = detach_known(x)
    assert known_amax(apart) == 5 and known_column_amax(apart) is not None
    x[0, 0] = 7
    assert all(known_amax(each) is None and known_column_amax(each) is None for each in (x, apart))


def test_a_function_keeps_the_amaxes_of_its_last_result() -> None:
    both = keeping_row_amax(with_row_amax(lambda x: (x, 2 * x)))(X)
    assert known_amax(both[1]) == 10 and known_amax(both[0]) is None
    assert known_amax(keeping_row_amax(with_row_amax(lambda x: -x))(X)) == 5


def curve(rank: Rank, config: RunConfig, keeps: bool) -> tuple[list[tuple[float, float]], int]:
    """Train with formulas that are not compiled. Returns losses and norms, and the passes for amaxes."""
    passes, found = [0], fp8.amax

    def counted(*given: Any) -> torch.Tensor:
        passes[0] += 1
        return found(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "compile_function", lambda function, **how: function)
        patch.setattr(fp8, "amax", counted)
        patch.setattr(recipe.Quantizer, "amax", lambda quantizer, x: counted(x, quantizer.spec.amax_block))
        if not keeps:
            patch.setattr(select.OpContext, "takes_amax", False)
        return train_curve(rank, config, 2), passes[0]


@pytest.mark.parametrize("parallel", [{}, {"parallel__tp": 2, "parallel__sp": True}], ids=str)
def test_steps_with_kept_amaxes_are_those_without(parallel: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit: norms find the amaxes of the inputs of qkv and gate_up, of two layers in two steps."""
    given = {"train__precision": "fp8", "fp8__recipe": "tensorwise", "fp8__first_layers_bf16": 0,
             "fp8__last_layers_bf16": 0, "backends__norm": "compile", "backends__add_norm": "compile"}  # fmt: skip
    given |= {"optimizer__lr": 1e-3, "batch__global": 2}
    tree = settings(LLAMA | {"num_layers": 2, "ffn_size": 64}, tmp_path, **given, **parallel)
    config = config_of(tree, tmp_path)
    (kept, few), (plain, many) = (run_world(len(parallel) or 1, curve, config, keeps)[0] for keeps in (True, False))
    assert kept == plain
    assert many - few == 2 * 2 * 2 * config.num_microbatches
