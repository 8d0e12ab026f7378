"""What decomposition leaves out is counted, and told by check, by data index and at the start of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.cli.check_data import data_summary
from megascale.cli.main import main
from megascale.data.mix.bucket_summary import describe_buckets, summarize_buckets
from megascale.train.run_splits import mixture_spec
from tests.data.datasets import SEQUENCE, data_config, mixture_of, write_dataset
from tests.data.read.test_decomposed_index import LENGTHS, decomposed


def test_shares_and_tokens_that_are_not_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    config = decomposed(tmp_path)
    found = summarize_buckets(mixture_of(config))
    samples = [dataset.shape.samples for dataset in mixture_of(config).datasets]
    assert [piece for piece, _ in found.shares] == [2, 4, 8]
    assert [share for _, share in found.shares] == pytest.approx([count / sum(samples) for count in samples])
    assert found.short == pytest.approx(sum(length % 2 for length in LENGTHS) / sum(LENGTHS))
    assert found.short + found.left == pytest.approx(1 - sum(samples) * SEQUENCE / sum(LENGTHS))
    assert f"{found.short:.2%} of the tokens are rests below 2 and are not read" in data_summary(config)
    epochs = config.train.steps * config.batch.total / sum(samples)
    assert f"{epochs:.3g} epochs" in data_summary(config), "an epoch has fewer samples than its tokens would fill"
    pieces = [dataset.piece or 0 for dataset in mixture_of(config).datasets]
    mean = sum(count * piece for count, piece in zip(samples, pieces, strict=True)) / sum(samples)
    assert f"as many scores as with data.document_length = {round(mean)}" in str(found)
    assert describe_buckets(mixture_spec(config, "train")) == str(found)


def test_the_commands_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "set", LENGTHS)
    keys = [
        "data.packing=decompose",
        "data.decompose_min_length=2",
        "data.attention_mask=document",
        "model.vocab_size=60000",
    ]
    given = [f"data.train={tmp_path / 'set'}", "data.mock=false", "data.split=[1.0, 0.0]", "model.seq_length=8"]
    data_config(tmp_path)
    for command in (["check"], ["data", "index"]):
        assert main([*command, str(tmp_path / "config-in.toml"), *given, *keys]) == 0
        assert "samples by the tokens of their pieces: 2 " in capsys.readouterr().out
