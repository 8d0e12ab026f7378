"""Decomposition of documents: lengths of pieces, turns and odds, and the rules of its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.data import DataConfig
from megascale.config.data_rules import decomposed_documents
from megascale.config.decomposition import Decomposition, decomposition, is_decomposed
from megascale.config.exclusions import NOT_DECOMPOSED
from megascale.config.model import ModelConfig
from megascale.config.rules import run_rules
from megascale.config.train import BatchConfig


def sections(seq_length: int = 2048, **data: Any) -> tuple[ModelConfig, BatchConfig, DataConfig]:
    """The sections that decomposition reads, with a global batch of 8."""
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 8, "seq_length": seq_length}
    keys = {"packing": "decompose", "attention_mask": "document", **data}
    return ModelConfig(**sizes), BatchConfig(**{"global": 8}), DataConfig(**keys)


def findings(**keys: Any) -> dict[str, str]:
    given = dict(zip(("model", "batch", "data"), sections(**keys), strict=True))
    found = run_rules((NOT_DECOMPOSED, decomposed_documents), given)
    return {finding.key: f"{finding.message} -> {finding.hint}" for finding in found}


def test_pieces_turns_and_odds() -> None:
    assert decomposition(*sections()) == Decomposition([256, 512, 1024, 2048], 8, None, 128)
    assert decomposition(*sections(64)).pieces == [64], "shorter samples are one bucket"
    found = decomposition(
        *sections(curriculum="grow_p2", decompose_min_length=512, decompose_bucket_samples=24, decompose_cycle=10)
    )
    assert found == Decomposition([512, 1024, 2048], 24, [4, 2, 1], 10)
    assert decomposition(*sections(curriculum="grow_linear")).odds == [4, 3, 2, 1]
    assert decomposition(*sections(curriculum=[1, 1, 0.5, 2])).odds == [1, 1, 0.5, 2]
    assert is_decomposed(sections()[2], "train") and not is_decomposed(sections()[2], "valid")


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"attention_mask": "causal"}, "data.packing", "unrelated pieces"),
        ({"seq_length": 96}, "model.seq_length", "needs a power of two, not 96 -> 64 or 128"),
        (
            {"decompose_min_length": 48},
            "data.decompose_min_length",
            "48 is no power of two up to seq_length = 2048 -> 32 or 64",
        ),
        (
            {"decompose_min_length": 4096},
            "data.decompose_min_length",
            "4096 is no power of two up to seq_length = 2048 -> 2048",
        ),
        ({"decompose_cycle": 3}, "data.decompose_cycle", "has no effect with curriculum = mixed"),
        ({"curriculum": [2, 1]}, "data.curriculum", "2 odds for pieces of 256, 512, 1024, 2048 tokens -> 4 odds"),
        (
            {"blend_schedule": [(12, [1])]},
            "data.blend_schedule",
            "place 12 is no multiple of decompose_bucket_samples = 8",
        ),
        (
            {"blend_schedule": [(16, [1])], "curriculum": "grow_p2", "decompose_cycle": 10},
            "data.blend_schedule",
            "place 16 is no multiple of decompose_bucket_samples x decompose_cycle = 80, as it must be with packing = "
            "decompose -> 80",
        ),
        (
            {"packing": "concat", "decompose_min_length": 8},
            "data.decompose_min_length",
            "has no effect with packing = concat",
        ),
        ({"packing": "best_fit", "curriculum": "grow_p2"}, "data.curriculum", "has no effect with packing = best_fit"),
    ],
)
def test_rules(keys: dict[str, Any], key: str, message: str) -> None:
    found = findings(**keys)
    assert list(found) == [key] and message in found[key]


def test_usable_configurations_have_no_findings() -> None:
    assert not findings() and not findings(packing="concat")
    assert not findings(curriculum="grow_p2", decompose_cycle=10, blend_schedule=[(80, [1])], decompose_min_length=1024)


def test_the_keys_of_a_file(tmp_path: Path) -> None:
    from tests.data.datasets import data_config

    keys = {
        "data__packing": "decompose",
        "data__decompose_min_length": 2,
        "data__attention_mask": "document",
        "data__curriculum": [4, 2, 1],
    }
    config = data_config(tmp_path, data__mock=False, data__train=_dataset(tmp_path), **keys)
    assert decomposition(config.model, config.batch, config.data) == Decomposition([2, 4, 8], 8, [4, 2, 1], 128)


def _dataset(folder: Path) -> str:
    from tests.data.datasets import write_dataset

    write_dataset(folder / "set", [13, 5, 1, 40, 8, 9, 30, 2, 21, 17, 16, 33, 3, 3, 6])
    return str(folder / "set")
