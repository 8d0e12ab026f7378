"""Calls and bytes of every collective of a step equal the formulas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megascale.core.rank import Rank
from megascale.plan.account.state_bytes import state_bytes
from tests.marks import only_quick, only_quick_rows
from tests.recorded_events import forget_events
from tests.runs import FAMILIES, GPT, build_run, builds, config_of, settings, traffic_of
from tests.worlds import run_world

Counts = dict[str, dict[str, tuple[int, int]]]


OFF = {f"overlap__{axis}": False for axis in ("tp", "pp", "dp")}


def traffic_of_a_step(rank: Rank, configs: list[Any]) -> list[Counts]:
    """Count (calls, bytes) by group and operation in the second step of runs of one layout."""
    from megascale.train.step import train_step

    results = []
    for run in builds(rank, configs):
        forget_events(run.mesh.recorder)
        train_step(run, run.train_loader.batch(0))
        train_step(run, run.train_loader.batch(8))
        run.buffers.finish_param_gather()
        run.pipeline.finish_sends()
        results.append(traffic_of(run, step=2))
    return results


def measure(tmp_path: Any, family: str, **layout: Any) -> tuple[Any, list[Counts]]:
    """Return the traffic by rank, after checking that overlap does not change it."""
    layout = {"train__precision": "fp32", "batch__global": 4} | layout
    trees = [settings(FAMILIES[family], tmp_path, **layout, **more) for more in ({}, OFF)]
    configs = [config_of(tree, tmp_path) for tree in trees]
    ranks = run_world(configs[0].world_size, traffic_of_a_step, configs)
    for on, off in ranks:
        assert on == off
    return configs[0], [on for on, _ in ranks]


@pytest.mark.parametrize("family", only_quick(FAMILIES, "gpt"))
def test_tensor_parallelism_has_four_collectives_a_layer(family: str, tmp_path: Any) -> None:
    config, counts = measure(tmp_path, family, parallel__tp=2)
    m, micro = config.model, config.num_microbatches
    activation = 4 * m.seq_length * config.batch.micro * m.hidden_size
    tokens = 4 * m.seq_length * config.batch.micro
    # 4 per layer; embedding forward and head backward 1 each; the loss 2, of 1 and of 2 elements per token
    for rank in counts:
        assert rank["tp"] == {
            "all_reduce": (
                micro * (4 * m.num_layers + 2 + 2),
                micro * ((4 * m.num_layers + 2) * activation + 3 * tokens),
            )
        }


@pytest.mark.parametrize("family", only_quick(FAMILIES, "llama"))
def test_sequence_parallelism_has_all_gathers_and_reduce_scatters(family: str, tmp_path: Any) -> None:
    config, counts = measure(tmp_path, family, parallel__tp=2, parallel__sp=True)
    m, micro = config.model, config.num_microbatches
    activation = 4 * m.seq_length * config.batch.micro * m.hidden_size
    # four pairs per layer, and two all-gathers for wgrad; a pair each for embedding and head
    gathers = micro * (4 * m.num_layers + 2 * m.num_layers + 2)
    scatters = micro * (4 * m.num_layers + 2)
    for rank in counts:
        assert rank["tp"]["all_gather"] == (gathers, gathers * activation)
        assert rank["tp"]["reduce_scatter"] == (scatters, scatters * activation)
        assert rank["tp"]["all_reduce"][0] == 2 * micro + 1  # the loss, and once per step the norms' gradients


@pytest.mark.parametrize(
    ("pp", "vpp", "schedule"), [(2, 1, "1f1b"), (2, 2, "interleaved_1f1b"), (4, 1, "gpipe"), (2, 2, "zb_v")]
)
def test_a_pipeline_sends_each_boundary_once_each_way(pp: int, vpp: int, schedule: str, tmp_path: Any) -> None:
    config, counts = measure(
        tmp_path, "llama", parallel__pp=pp, parallel__vpp=vpp, parallel__schedule=schedule, model__dropout=0.0
    )
    m = config.model
    activation = 4 * m.seq_length * config.batch.micro * m.hidden_size
    handed = 1 if schedule == "zb_v" else 0  # on the last rank, to its own next stage
    boundaries = config.num_microbatches * (pp * vpp - 1 - handed)
    sent = [rank[group].get("send", (0, 0)) for rank in counts for group in ("pp.up", "pp.down")]
    received = [rank[group].get("receive", (0, 0)) for rank in counts for group in ("pp.up", "pp.down")]
    for messages in (sent, received):
        assert sum(calls for calls, _ in messages) == 2 * boundaries
        assert sum(size for _, size in messages) == 2 * boundaries * activation


@pytest.mark.parametrize(
    ("zero", "bucket_bytes"),
    only_quick_rows(itertools.product([0, 1, 2], [60_000, 1 << 25]), (0, 1 << 25), (1, 60_000), (2, 60_000)),
)
def test_data_parallelism_moves_gradients_and_weights_once(zero: int, bucket_bytes: int, tmp_path: Any) -> None:
    layout = {"parallel__dp": 2, "parallel__zero": zero, "overlap__bucket_bytes": bucket_bytes}
    config, counts = measure(tmp_path, "llama", **layout)
    from megascale.layout.chunks import chunk_buckets

    weights, (cut,) = (
        state_bytes(config, 0).parameters,
        chunk_buckets(config.model, config.parallel, config.overlap, config.train, 0),
    )
    n, reductions = len(cut), config.num_microbatches if zero == 2 else 1
    assert (n > 1) == (bucket_bytes < weights)
    expected = {
        0: {"all_reduce": (n, weights)},
        1: {"reduce_scatter": (n, weights), "all_gather": (n, weights)},
        2: {"reduce_scatter": (n * reductions, reductions * weights), "all_gather": (n, weights)},
    }[zero]
    for rank in counts:
        assert rank["dp"] == expected


def test_a_tied_embedding_is_all_reduced_once(tmp_path: Any) -> None:
    config, counts = measure(tmp_path, "gpt", parallel__pp=4)
    from megascale.layout.tensors import padded_vocab

    size = 4 * padded_vocab(config.model, 1) * config.model.hidden_size
    assert [rank["tied"] for rank in counts] == [{"all_reduce": (1, size)}, {}, {}, {"all_reduce": (1, size)}]


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 0},
        {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 2},
        {"parallel__pp": 2},
    ],
    ids=lambda layout: " ".join(f"{key[10:]}{value}" for key, value in layout.items()),
)
@pytest.mark.slow
def test_lamb_all_reduces_two_norms_per_matrix(layout: dict[str, int], tmp_path: Any) -> None:
    """Over tp, over dp if ZeRO shards parameters, and between the first and last stages for a tied embedding."""
    from megascale.layout.chunks import chunk_buckets

    tree = settings(GPT, tmp_path, train__precision="fp32", overlap__bucket_bytes=20_000, **layout)
    adamw, lamb = (config_of(tree, tmp_path, [f"optimizer.name={name}"]) for name in ("adamw", "lamb"))
    p = lamb.parallel
    for rank, (before, after) in enumerate(run_world(lamb.world_size, traffic_of_a_step, [adamw, lamb])):
        (buckets,) = chunk_buckets(lamb.model, lamb.parallel, lamb.overlap, lamb.train, rank if p.pp > 1 else 0)
        sums = (1, 8 * 2 * sum(parameter.is_matrix for bucket in buckets for parameter in bucket))
        more = {"tp": sums if p.tp > 1 else (0, 0), "dp": sums if p.zero and lamb.dp > 1 else (0, 0)}
        more["tied"] = (1, 8 * 2) if p.pp > 1 else (0, 0)
        for group, operations in after.items():
            (calls, size), (old, old_size) = (it.pop("all_reduce", (0, 0)) for it in (operations, before[group]))
            assert (calls - old, size - old_size) == more.get(group, (0, 0)), group
            assert operations == before[group]


def test_the_world_all_reduces_six_elements(tmp_path: Any) -> None:
    _, counts = measure(tmp_path, "gpt", parallel__pp=2, parallel__dp=2)
    for rank in counts:
        assert rank["world"] == {"all_reduce": (1, 8 * 6)}  # loss, tokens, stop, two of the checkpoint, squared norm


def traffic_of_a_large_job(rank: Rank, configs: list[Any]) -> list[Counts]:
    """Run with a limit as if the job had too many ranks for one collective."""
    from megascale.comm import mesh

    mesh.MAX_FLAT_REDUCE_RANKS = 1
    return traffic_of_a_step(rank, configs)


def test_a_large_job_reduces_axis_by_axis(tmp_path: Any) -> None:
    layout = {"parallel__tp": 2, "parallel__pp": 2}
    config = config_of(settings(GPT, tmp_path, train__precision="fp32", batch__global=2, **layout), tmp_path)
    for (rank,) in run_world(4, traffic_of_a_large_job, [config]):
        sums = {name: operations for name, operations in rank.items() if name.startswith("world") and operations}
        assert sums == {name: {"all_gather": (1, 2 * 8 * 6)} for name in ("world.tp", "world.pp")}


def test_a_rank_opens_only_its_own_groups(tmp_path: Any) -> None:
    config = config_of(settings(GPT, tmp_path, parallel__tp=2, parallel__pp=2, parallel__dp=2), tmp_path)
    for rank, opened in enumerate(run_world(8, opened_groups, config)):
        assert all(rank in ranks for ranks in opened)
        assert len(opened) <= 6  # world, tp, dp, two for the pipeline, and the tied embedding's group


def opened_groups(rank: Rank, config: Any) -> list[list[int]]:
    """List the ranks of every process group with a communicator in this process."""
    from torch.distributed import distributed_c10d

    build_run(rank, config)
    return [sorted(ranks) for ranks in distributed_c10d._world.pg_group_ranks.values()]
