"""Memory of training in chunks: activations do not grow with the longest sequence; keys, values and inputs do."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.plan.account.chunk_memory import chunk_memory, with_context
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.traffic import step_traffic
from megascale.plan.dryrun.dry_run import dry_run
from tests.plan.account.executed_flops import rank_flops
from tests.plan.account.test_against_dry_run import sent_by
from tests.runs import LLAMA, config_of, settings

CHUNK = 4096


@pytest.fixture(scope="module")
def config() -> RunConfig:
    keys = ["parallel.pp=4", "parallel.vpp=1", "batch.global=64"]
    return load_config("configs/gpu/llama3-8b.toml", keys, world_size=64, skip_sections=["data"])


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_activations_are_those_of_the_kept_chunks(config: RunConfig, keep: int) -> None:
    one = config.batch.model_copy(update={"total": config.dp, "micro": 1})
    alone = with_context(config, CHUNK).model_copy(update={"batch": one})
    for stage in range(4):
        activations = {
            chunk_memory(JobMemory(config), stage, CHUNK, keep, n).activations for n in (65536, 262144, 1048576)
        }
        assert activations == {(keep + 4 - stage - 1) * JobMemory(alone).rank(stage).activations}


def test_the_store_grows_with_the_longest_sequence(config: RunConfig) -> None:
    m, tp, longest = config.model, config.parallel.tp, 1048576
    rank = chunk_memory(JobMemory(config), 0, CHUNK, 2, longest)
    layers = m.num_layers // 4
    assert rank.store == longest * layers * 2 * m.num_kv_heads * m.head_dim * (2 + 4) // tp
    assert rank.inputs == (longest - 2 * CHUNK) * m.hidden_size * 2 // (tp if config.parallel.sp else 1)
    assert rank.total == rank.parameters + rank.gradients + rank.optimizer + rank.activations + (
        rank.transient + rank.store + rank.inputs
    )


def test_short_sequences_need_no_store(config: RunConfig) -> None:
    rank = chunk_memory(JobMemory(config), 0, CHUNK, 2, CHUNK)
    assert rank.store == rank.inputs == 0
    assert rank.activations == chunk_memory(JobMemory(config), 0, CHUNK, 1, CHUNK).activations


def test_a_run_in_chunks_equals_its_dry_run(tmp_path: Path) -> None:
    """FLOPs and communication exactly; memory, of which transient bytes are a bound, within 15%."""
    sizes = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 1024, "vocab_size": 1000}
    keys = {"data__sequence_chunk_tokens": 512, "batch__global": 1, "parallel__pp": 2, "train__precision": "bf16"}
    model = LLAMA | sizes | {"seq_length": 1536, "num_layers": 2}
    run = config_of(settings(model, tmp_path, **keys), tmp_path)
    for rank in range(2):
        dry = dry_run(run, rank)
        assert rank_flops(run, rank) == dry.flops.total()
        assert step_traffic(run, dry.coord) == sent_by(dry)
        assert 0.97 < JobMemory(run).rank(rank).total / dry.peak.total() < 1.15
