"""`megascale plan lengths`: ways to train on sequences of unequal lengths, from a distribution and from a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.cli.main import main
from megascale.data.read.indexed_dataset import TokenizerInfo
from tests.data.datasets import write_documents

JOB = ["plan", "lengths", "configs/gpu/llama3-8b.toml", "--gpus", "64", "--hardware", "h100", "--length-steps", "2"]
SIZES = ["model.seq_length=131072", "batch.global=32"]
DRAWN = ["--lengths", "lognormal:median=1000,sigma=1.8"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*JOB, *SIZES, *arguments, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def test_hybrid_is_close_to_the_bound_with_less_communication(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, *DRAWN, "--max-tokens-per-rank", "8192")
    static, balanced, hybrid = plan["ways"]
    assert static["name"] == "static cp 16" and plan["ranks"] == 32 and plan["longest"] == 131072
    assert hybrid["makespan"] <= 1.1 * hybrid["bound"]
    assert static["makespan"] > balanced["makespan"] > hybrid["makespan"]
    assert hybrid["context_bytes"] < 0.5 * static["context_bytes"]
    assert plan["tokens"] == pytest.approx(32 * 131072, rel=0.02)
    assert hybrid["tokens_per_s"] == pytest.approx(plan["tokens"] / hybrid["step_s"])


def test_tables_have_ways_modes_and_offload(capsys: pytest.CaptureFixture[str]) -> None:
    chunks = ["--chunk-tokens", "8192", "--keep-chunks", "2"]
    assert main([*JOB, *SIZES, *DRAWN, "--max-tokens-per-rank", "8192", *chunks]) == 0
    out = capsys.readouterr().out
    for words in (
        "llama3-8b with lognormal:median=1000,sigma=1.8: 2 steps of",
        "32 ranks of dp x cp, 8,192 tokens each in a micro-batch",
        "static cp 16, balanced",
        "chunks of 8,192, K = 2",
        "Ulysses: sent in a layer, exposed in a stage",
        "the longest sequence takes 16 ranks; 100% of its activations can leave to host memory",
        "grow with the longest sequence",
    ):
        assert words in out


def test_short_sequences_send_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--lengths", "fixed:length=4096", "--max-tokens-per-rank", "8192")
    assert [way["context_bytes"] for way in plan["ways"]] == [0, 0, 0]
    assert plan["ways"][0]["name"] == "static cp 1"


def test_the_tokens_of_a_rank_are_those_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    most = planned(capsys, *DRAWN)["max_tokens_per_rank"]
    assert 8192 < most <= 131072
    recomputed = planned(capsys, *DRAWN, "train.recompute=full")["max_tokens_per_rank"]
    assert recomputed > most


HYBRID = ["parallel.hybrid_dp=true", "data.max_tokens_per_rank=16384", "data.attention_mask=document"]


def test_a_hybrid_configuration_has_the_plan_of_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["parallel.vpp=1", "parallel.sp=false", "batch.micro=1", "parallel.zero=1", "data.attention_mask=document"]
    static = planned(capsys, *DRAWN, *keys, "--max-tokens-per-rank", "16384")
    assert planned(capsys, *DRAWN, *keys, *HYBRID) == static
    usp = ["parallel.cp=4", "parallel.cp_mode=usp", "parallel.cp_a2a_size=2"]
    assert planned(capsys, *DRAWN, *keys, *usp, "--max-tokens-per-rank", "16384")["ways"] == static["ways"]


def test_a_search_of_hybrid_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["parallel.vpp=1", "parallel.sp=false", "batch.micro=1", "parallel.zero=1", *HYBRID]
    assert main(["plan", *JOB[2:-2], "--search", *SIZES, *keys]) == 2
    assert "parallel.hybrid_dp: the time of hybrid_dp depends on the lengths of documents" in capsys.readouterr().err


def test_pipelines_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["parallel.pp=4", "parallel.vpp=1", "--max-tokens-per-rank", "16384", "--chunk-tokens", "8192"]
    plan = planned(capsys, *DRAWN, *keys)
    static, _, hybrid, chunked = plan["ways"]
    assert hybrid["bound"] < hybrid["makespan"] < static["makespan"]
    memory = plan["chunks"]["memory"]
    assert memory["total"] == sum(memory.values()) - memory["total"]
    assert chunked["context_bytes"] == 0


def test_chunks_are_searched(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["parallel.pp=4", "parallel.vpp=1", "--max-tokens-per-rank", "16384", "--length-steps", "1"]
    chosen = planned(capsys, *DRAWN, *keys, "--chunk-tokens", "auto")
    chunks, limit = chosen["chunks"], 83 * 2**30
    assert chunks["memory"]["total"] < limit
    for tokens, keep in (("2048", "1"), ("32768", "1")):
        other = planned(capsys, *DRAWN, *keys, "--chunk-tokens", tokens, "--keep-chunks", keep)
        assert other["chunks"]["memory"]["total"] > limit or chosen["ways"][3]["step_s"] <= other["ways"][3]["step_s"]
    too_deep = ["--max-tokens-per-rank", "8192", "--chunk-tokens", "auto", "model.num_layers=2048"]
    assert main([*JOB, *SIZES, *DRAWN, *too_deep]) == 2
    assert "chunks of 2048 tokens take" in capsys.readouterr().err


def test_a_dataset_s_own_lengths(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    documents = [np.zeros(length, np.int32) for length in (100, 300, 300_000)]
    write_documents(tmp_path / "corpus", documents, TokenizerInfo("bytes", "", 0), 257)
    plan = planned(capsys, "--lengths", str(tmp_path / "corpus"), "--max-tokens-per-rank", "8192")
    assert plan["longest"] == 131072 and plan["ways"][2]["context_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--lengths", "normal:mean=3"], 2, "there is no distribution 'normal'"),
        (["--lengths", "nowhere/corpus"], 3, "nowhere/corpus"),
        ([*DRAWN, "--max-tokens-per-rank", "1000"], 2, "the longest sequence has 131,072 tokens, 32 ranks hold 1,000"),
        ([*DRAWN, "parallel.pp=2", "parallel.vpp=2"], 2, "plan with parallel.vpp=1"),
    ],
)
def test_mistakes_have_a_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    assert main([*JOB, *SIZES, *arguments]) == status
    assert message in capsys.readouterr().err
