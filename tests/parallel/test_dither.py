"""Stochastic rounding has the same random bits in every layout: an element's follow from its global place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.sequence_shard import sequence_chunk, shard_sequence
from megascale.parallel.dither import number_tokens
from tests.marks import only_quick
from tests.runs import LLAMA, build_run, config_of, micro_batch, settings
from tests.worlds import run_world

MODEL = LLAMA | {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 128, "seq_length": 64}
SIDE = 384  # at least the features of an operand, and the tokens of a step; later tokens are counted from 0 again

Rounded = dict[tuple[int, int], tuple[Any, Any]]
"""By Philox's key the codes of an operand, u8 [rows, blocks, 8], and the numbers before rounding [rows, blocks, 16],
NaN where this rank has none.
"""


def configured(folder: Path, **more: Any) -> RunConfig:
    """A run that rounds gradients stochastically."""
    more = {"train__precision": "fp8", "fp8__recipe": "nvfp4", "batch__global": 4} | more
    more = {"fp8__first_layers_bf16": 1, "fp8__last_layers_bf16": 1} | more
    return config_of(settings(MODEL, folder, **more), folder).resolve(None)


def rounded_in_a_step(rank: Rank, config: RunConfig, steps: int = 1) -> Rounded:
    """Train, and return what is rounded stochastically on this rank. Repeated casts must be equal."""
    from megascale.ops.nvfp4 import Nvfp4Quantizer
    from megascale.train.step import train_step

    cast, rounded = Nvfp4Quantizer.encode, Rounded()

    def encode(self: Any, x: Any, expected: Any = None, **options: Any) -> Any:
        quantized = cast(self, x, expected, **options)
        if (dither := options.get("dither")) is not None:
            rows, blocks = dither.rows[:, None] % SIDE, dither.blocks % (SIDE // 16)
            codes, numbers = rounded.setdefault(dither.key, (np.zeros((SIDE, SIDE // 16, 8), np.uint8), nothing()))
            given, known = x.float().reshape(len(rows), -1, 16).numpy(), ~np.isnan(numbers[rows, blocks])
            found = quantized.codes.reshape(len(rows), -1, 8).numpy()
            assert (codes[rows, blocks] == found)[known.all(-1)].all(), "an operand is rounded in two ways"
            codes[rows, blocks], numbers[rows, blocks] = found, given
        return quantized

    Nvfp4Quantizer.encode = encode  # type: ignore[method-assign]
    run = build_run(rank, config)
    for step in range(steps):
        train_step(run, run.train_loader.batch(step * config.batch.total))
    return rounded


def nothing() -> Any:
    return np.full((SIDE, SIDE // 16, 16), np.nan, np.float32)


def merged(ranks: list[Rounded]) -> Rounded:
    together = Rounded()
    for rank in ranks:
        for key, (codes, x) in rank.items():
            all_codes, numbers = together.setdefault(key, (np.zeros_like(codes), nothing()))
            here, twice = ~np.isnan(x).any(-1), ~np.isnan(x + numbers).any(-1)
            assert (all_codes[twice] == codes[twice]).all(), f"{key} differs between ranks"
            all_codes[here], numbers[here] = codes[here], x[here]
    return together


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Rounded:
    return run_world(1, rounded_in_a_step, configured(tmp_path_factory.mktemp("alone")))[0]


LAYOUTS: dict[str, tuple[int, bool, dict[str, Any]]] = {  # ranks; bit-equal operands; settings
    "pp": (2, True, {"parallel__pp": 2}),
    "vpp": (2, True, {"parallel__pp": 2, "parallel__vpp": 2}),
    "dp": (2, True, {"parallel__dp": 2}),
    "zero 1": (2, True, {"parallel__dp": 2, "parallel__zero": 1}),
    "zero 3": (4, True, {"parallel__dp": 4, "parallel__zero": 3}),
    "recomputation": (1, True, {"train__recompute": "full"}),
    "split backward": (2, True, {"parallel__pp": 2, "parallel__schedule": "zb_h1"}),
    "accumulation 2": (1, False, {"batch__micro": 2}),
    "accumulation 1": (1, False, {"batch__micro": 4}),
    "tp": (2, False, {"parallel__tp": 2}),
    "sp": (2, False, {"parallel__tp": 2, "parallel__sp": True}),
    "sp 4": (4, False, {"parallel__tp": 4, "parallel__sp": True}),
    "sp, a collective": (2, False, {"parallel__tp": 2, "parallel__sp": True, "overlap__tp": False}),
    "ring": (2, False, {"parallel__cp": 2, "parallel__cp_mode": "ring"}),
    "ulysses and sp": (4, False, {"parallel__cp": 2, "parallel__cp_mode": "ulysses", "parallel__tp": 2}),
}


@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "pp", "zero 3", "accumulation 2", "sp", "ring"))
def test_layouts_round_alike(layout: str, alone: Rounded, tmp_path: Path) -> None:
    ranks, equal, more = LAYOUTS[layout]
    together = merged(run_world(ranks, rounded_in_a_step, configured(tmp_path, **more)))
    assert together.keys() == alone.keys()
    for key, (codes, x) in alone.items():
        others, y = together[key]
        assert (np.isnan(x) == np.isnan(y)).all(), f"{key} has other places"
        if equal:
            assert (codes == others).all(), key
        noise, typical = np.linalg.norm(np.nan_to_num(x - y), axis=-1), np.linalg.norm(np.nan_to_num(x), axis=-1)
        assert (noise <= 0.7 * typical + 0.2 * typical.max()).all(), f"{key} has bits of other elements"


def test_steps_and_operands_have_bits_of_their_own(alone: Rounded, tmp_path: Path) -> None:
    rounded = run_world(1, rounded_in_a_step, configured(tmp_path), 2)[0]
    assert {step for _, step in rounded} == {1, 2} and {key for key in rounded if key[1] == 1} == alone.keys()
    assert len(alone) == 2 * 2 * 4  # both directions of the gradients of four layers in two blocks
    features, tokens = 3 * 128 + 128 + 2 * 128 + 128, 4 * MODEL["seq_length"]
    assert sum((~np.isnan(x)).sum() for _, x in alone.values()) == 2 * 2 * features * tokens


def numbered(samples: list[int], **shard: Any) -> list[list[int]]:
    return number_tokens(micro_batch(samples, **shard), 8, torch.device("cpu")).t().tolist()


def test_tokens_are_numbered_by_sample_and_position() -> None:
    assert numbered([2, 5]) == [[*range(16, 24)], [*range(40, 48)]]
    assert numbered([1], shard=shard_sequence(8, 2, 1, 0)) == [[8, 9, 14, 15]]
    assert numbered([1], shard=sequence_chunk(8, 4, 1)) == [[12, 13, 14, 15]]
