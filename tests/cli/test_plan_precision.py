"""`megascale plan precision`: a table, JSON, and what the law was not fitted on."""

from __future__ import annotations

import json

import pytest

from megascale.cli.main import main

JOB = ["plan", "precision", "configs/gpu/llama3-8b.toml", "--tokens", "300e9"]


def test_the_loss_by_format_and_where_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """32 layers of 218M weights in linear layers: the law leaves out embedding and head."""
    assert main(JOB) == 0
    out = capsys.readouterr().out
    assert "llama3-8b: 6.98B weights of linear layers, 300.00B tokens, a scale for 128 elements" in out
    assert [line.split()[0] for line in out.splitlines()[2:6]] == ["bf16", "e4m3", "e5m2", "e2m1"]
    assert "the constants belong to that data, tokenizer and model" in out
    assert "outside of that range: 6.98B weights, 300.00B tokens" in out


def test_smaller_blocks_add_less(capsys: pytest.CaptureFixture[str]) -> None:
    added = {}
    for block in ("16", "256"):
        assert main([*JOB, "--block", block, "--json"]) == 0
        added[block] = json.loads(capsys.readouterr().out)["formats"]["e2m1"]["added"]
    assert added["256"] == pytest.approx(2 * added["16"])


def test_experts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "precision", "configs/gpu/mixtral-8x22b.toml"]) == 2
    assert "model.experts: is 8, and the law was fitted on dense models" in capsys.readouterr().err
