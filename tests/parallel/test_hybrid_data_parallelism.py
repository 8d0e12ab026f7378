"""Documents that a planner deals to a pool of ranks, in packs and in rings of any size, are the run of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.data.mix import hybrid_batches, mock_mixture
from megascale.data.mix.hybrid_batches import HybridPool
from megascale.layout.hybrid.planner import plan_hybrid
from megascale.parallel.microbatch import MicroBatch
from megascale.plan.account.context_bytes import Heads, context_bytes
from megascale.plan.account.flops import sequence_flops
from megascale.train.step import train_step
from tests.parallel.test_context_parallel import CASES, Case, check_equal, configure, layout, train
from tests.recorded_events import recorded_events
from tests.runs import LLAMA, config_of, curve_of, settings
from tests.thread_world import run_threads

DOCUMENTS = [13, 2, 1, 8]
MASKED = {"data__attention_mask": "document", "batch__global": 4}
HYBRID = {"parallel__hybrid_dp": True, "data__max_tokens_per_rank": 6}
POOLS = {
    "dp4": layout(dp=4),
    "cp2 dp3": layout(cp=2, dp=3),
    "cp5 zero0": layout(cp=5, zero=0),
    "dp4 tp2": layout(dp=4, tp=2),
    "dp4 pp2": layout(dp=4, pp=2),
    "dp4 pp3, no overlap": layout(dp=4, pp=3) | {"overlap__pp": False},
    "cp2 dp2 tp2 pp2": layout(cp=2, dp=2, tp=2, pp=2),
}


@pytest.fixture(autouse=True)
def unequal_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of mock data have documents of unequal lengths."""
    monkeypatch.setattr(mock_mixture, "equal_documents", lambda length, document: DOCUMENTS)


def check(family: str, pool: dict[str, Any], keys: dict[str, Any], folder: Path) -> None:
    case = Case(family, {"data__attention_mask": "document", **keys})
    (alone,) = run_threads(configure(case, folder), train)
    check_equal(run_threads(configure(case, folder, **(HYBRID | pool)), train), alone)


def test_documents_in_packs_and_rings_do_not_change_a_run(tmp_path: Path) -> None:
    """Documents of 13, 2, 1 and 8 tokens at 6 a rank: rings of 3 and 2 ranks and more, and packs."""
    check("llama", POOLS["dp4"], {"batch__global": 4}, tmp_path)


def test_sinks_of_attention_in_packs_and_rings(tmp_path: Path) -> None:
    sinks = {"model__attention_sinks": True, "model__init_std": 0.3}
    check("llama", POOLS["dp4"], {"batch__global": 4} | sinks, tmp_path)


def test_sparse_attention_in_packs_and_rings(tmp_path: Path) -> None:
    sparse = {"model__sparse_attention": {"local_blocks": 1, "stride": 4, "block": 2}, "model__init_std": 0.3}
    check("llama", POOLS["dp4"], {"batch__global": 4} | sparse, tmp_path)


def test_rings_meet_in_pipelines(tmp_path: Path) -> None:
    """Pipelines with micro-batches of different lengths and numbers."""
    check("gpt", layout(dp=2, pp=2) | {"data__max_tokens_per_rank": 12}, {"batch__global": 4}, tmp_path)


def test_a_rank_may_have_no_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mock_mixture, "equal_documents", lambda length, document: [length])
    check("gpt", layout(cp=2, dp=2) | {"data__max_tokens_per_rank": 24}, {"batch__global": 2}, tmp_path)


def with_steps(monkeypatch: pytest.MonkeyPatch, step: int, rows: set[int]) -> None:
    """Let micro-batches have multiples of `step` rows, as on GPUs, and note the numbers of rows."""

    class Padded(HybridPool):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given[:-1], step=step)

        def micro_batches(self, *given: Any) -> list[MicroBatch]:
            found = super().micro_batches(*given)
            lengths = [document.stop - document.start for document in hybrid_batches.documents_of(*given[:2])]
            plan = plan_hybrid(lengths, self.ranks, self.max_tokens, self.work, self.stages)
            assert [part.planned_rows for part in found] == (plan.rows(self.rank, step) or [step])
            rows.update(part.planned_rows or 0 for part in found)
            assert all(part.tokens is None or len(part.tokens) == part.planned_rows for part in found)
            return found

    monkeypatch.setattr(hybrid_batches, "HybridPool", Padded)


@pytest.mark.parametrize(
    ("pool", "step"),
    [("dp4", 4), ("dp4", 6), ("dp4 pp2", 4), pytest.param("cp2 dp2 tp2 pp2", 4, marks=pytest.mark.slow)],
)
def test_padding_of_rows_changes_no_run(pool: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packs and of rings: a multiple of `step` rows, or the most of a rank."""
    rows = set[int]()
    (alone,) = run_threads(configure(Case("llama", MASKED), tmp_path), train)
    with_steps(monkeypatch, step, rows)
    padded = run_threads(configure(Case("llama", MASKED), tmp_path, **(HYBRID | POOLS[pool])), train)
    check_equal(padded, alone)
    assert rows <= {step, 6}, "without padding 2 to 6"


def test_a_rank_without_documents_has_padded_rows_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mock_mixture, "equal_documents", lambda length, document: [length])
    rows = set[int]()
    with_steps(monkeypatch, 8, rows)
    check("gpt", layout(cp=2, dp=2) | {"data__max_tokens_per_rank": 24}, {"batch__global": 2}, tmp_path)
    assert rows == {8, 24}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_ring_in_the_last_backward_waits_for_no_reduction(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring is a rank's first micro-batch where another rank has packs before it, and is the last of some rank."""
    monkeypatch.setattr(mock_mixture, "equal_documents", lambda length, document: [15, 9])
    buckets = {"overlap__dp": overlap, "overlap__bucket_bytes": 2000, "model__num_layers": 4}
    check("llama", layout(cp=2) | {"data__max_tokens_per_rank": 12}, {"batch__global": 1} | buckets, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"model__window": 4}, {"train__recompute": "full"}], ids=str)
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("pool", POOLS)
def test_no_pool_changes_a_run(pool: str, family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    check(family, POOLS[pool], {"batch__global": 12} | keys, tmp_path)


@pytest.mark.slow
def test_documents_from_16_to_4096_tokens_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [4096, 16, 1500, 64, 420, 2048]
    monkeypatch.setattr(mock_mixture, "equal_documents", lambda length, document: documents)
    keys = {"model__seq_length": sum(documents), "batch__global": 4}
    check("llama", layout(dp=4, pp=2) | {"data__max_tokens_per_rank": 2100}, keys, tmp_path)


def sent_and_attended(folder: Path, keys: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Bytes that all ranks send on in a step, and the scores of its attention, as every rank knows them."""
    config = configure(CASES["llama"], folder, data__attention_mask="document", **keys)

    def step(run: Any) -> tuple[int, dict[str, float]]:
        result = train_step(run, run.train_loader.batch(0))
        run.buffers.finish_param_gather()
        sent = sum(event.bytes for event in recorded_events(run.mesh.recorder) if event.name == "send_on")
        return sent, {name: total for name, total in result.totals.items() if name.startswith("scores")}

    ranks = run_threads(config, step)
    return sum(sent for sent, _ in ranks), ranks[0][1]


def ring_bytes(config: RunConfig) -> float:
    """Bytes that the rings of a step send by the formula, of all layers and ranks."""
    m, most = config.model, config.data.max_tokens_per_rank
    assert most is not None
    plan = plan_hybrid(DOCUMENTS * config.batch.total, config.dp, most, sequence_flops(config.model))
    heads = Heads(m.num_heads, m.num_kv_heads, m.head_dim, compute=8, accumulate=8)
    rings = [(plan.lengths[ring.sequences[0]], ring.ranks) for ring in plan.rings]
    return m.num_layers * sum(ranks * sum(context_bytes("ring", length, ranks, heads)) for length, ranks in rings)


def test_only_documents_that_do_not_fit_a_rank_are_sent(tmp_path: Path) -> None:
    _, attended = sent_and_attended(tmp_path, {})
    for most, sends in ((13, False), (12, True), (6, True)):
        keys = HYBRID | layout(dp=4) | {"data__max_tokens_per_rank": most}
        sent, scores = sent_and_attended(tmp_path, keys)
        config = configure(CASES["llama"], tmp_path, data__attention_mask="document", **keys)
        assert (sent > 0) == sends and sent == ring_bytes(config) and scores == attended


def test_fp8_with_scales_of_powers_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs and rings have whole rows of GEMMs, and hardly change what is quantized."""
    monkeypatch.setattr(mock_mixture, "equal_documents", lambda length, document: [26, 4, 2, 32])
    sizes = {"hidden_size": 64, "ffn_size": 128, "num_heads": 4, "num_kv_heads": 4, "seq_length": 64}
    keys = {"train__precision": "fp8", "fp8__recipe": "rowwise", "fp8__scale": "pow2", **MASKED}
    pool = {"parallel__dp": 4, "parallel__hybrid_dp": True, "data__max_tokens_per_rank": 32}
    alone, hybrid = (config_of(settings(LLAMA | sizes, tmp_path, **keys, **more), tmp_path) for more in ({}, pool))
    (expected,), found = (run_threads(config, lambda run: curve_of(run, 3)) for config in (alone, hybrid))
    for (loss, norm), (whole, whole_norm) in zip(found[0], expected, strict=True):
        assert loss == pytest.approx(whole, rel=2e-3)
        assert norm == pytest.approx(whole_norm, rel=5e-2)
