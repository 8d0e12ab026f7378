"""Overlap changes the time of communication only: equal results, bytes and messages for any timing."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.catalog.layers import BLOCKS
from megascale.comm.group import Group
from megascale.comm.p2p_collectives import P2PTransport
from megascale.comm.work import COMPLETED
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.pieces import split_rows
from megascale.record.recorder import EventRecord
from tests.marks import only_quick
from tests.runs import FAMILIES, GPT, LLAMA, build_run, config_of, curve_of, send_messages, settings, traffic_of
from tests.worlds import run_world

SMALL_BUCKETS = {"overlap__bucket_bytes": 20_000}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero0": {"parallel__dp": 2, "parallel__zero": 0, **SMALL_BUCKETS},
    "dp2 zero1": {"parallel__dp": 2, **SMALL_BUCKETS},
    "dp2 zero2": {"parallel__dp": 2, "parallel__zero": 2, **SMALL_BUCKETS},
    "pp2": {"parallel__pp": 2},
    "pp2 vpp2 dp2": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "tp2 sp dp2 zero2": {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__zero": 2},
    "tp2 pp2": {"parallel__tp": 2, "parallel__pp": 2, "parallel__schedule": "gpipe"},
    "tp4 sp": {"parallel__tp": 4, "parallel__sp": True},
    "dp2 bf16": {"parallel__dp": 2, "train__precision": "bf16", **SMALL_BUCKETS},
    "tp2 sp pp2 bf16": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "train__precision": "bf16"},
}
OFF: dict[str, dict[str, Any]] = {axis: {f"overlap__{axis}": False} for axis in ("dp", "pp", "tp")}

Outcome = tuple[list[tuple[float, float]], np.ndarray]
"""Loss and gradient norm by step, and a rank's weights at the end."""


def outcome(run: Any, steps: int) -> Outcome:
    import torch

    curve = curve_of(run, steps)
    return curve, torch.cat([bucket.weights for bucket in run.buffers.buckets]).double().numpy().copy()


TRANSPORTS = ("messages", "shared", "backend")


def by_messages(rank: Rank, config: RunConfig, mesh: Any = None, transport: str = "messages") -> Any:
    """Build a run whose groups communicate by messages in small pieces, or by another of TRANSPORTS."""
    from megascale.parallel import tp_overlap

    tp_overlap.MIN_PIECE_BYTES = 512
    run = build_run(rank, config, mesh)
    for group in run.mesh.groups:
        if mesh is None and transport != "shared" and not group.name.startswith("pp"):
            send_messages(group, backend=transport == "backend")
    return run


def switched(rank: Rank, configs: list[RunConfig]) -> list[Outcome]:
    """Train every configuration; all have the same layout."""
    mesh, measured = None, []
    for config in configs:
        run = by_messages(rank, config, mesh)
        mesh = run.mesh
        measured.append(outcome(run, config.train.steps))
    return measured


@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "tp2 sp"))
def test_overlap_changes_no_result(layout: str, tmp_path: Path) -> None:
    family = GPT if "pp" in layout else LLAMA | {"num_kv_heads": 4}
    common: dict[str, Any] = {"train__precision": "fp32", "train__steps": 3, "batch__global": 4}
    common["model__block"] = "parallel" if "sp" in layout else "serial"
    common["model__num_layers"] = 4 if "vpp2" in layout else 2
    common |= LAYOUTS[layout]
    trees = [settings(family, tmp_path, **common, **off) for off in ({}, *OFF.values())]
    configs = [config_of(tree, tmp_path) for tree in trees]
    for on, *others in run_world(configs[0].world_size, switched, configs):
        for axis, (curve, weights) in zip(OFF, others, strict=True):
            if axis == "tp" and "bf16" in layout:
                np.testing.assert_allclose(curve, on[0], rtol=1e-2)
            elif axis == "tp":
                np.testing.assert_allclose(curve, on[0], rtol=1e-4)
                np.testing.assert_allclose(weights, on[1], atol=1e-3)
            else:
                assert curve == on[0]
                assert np.array_equal(weights, on[1]), axis


def random_layout(chance: random.Random) -> dict[str, Any]:
    """Draw a layout of two to eight ranks, with any schedule and any overlap settings."""
    tp, pp, dp = chance.choice(
        [(1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 1, 2), (2, 1, 1), (1, 3, 1), (1, 2, 1), (1, 1, 3), (2, 2, 2)]
    )
    vpp = chance.choice((1, 2)) if pp > 1 else 1
    layout: dict[str, Any] = {"parallel__tp": tp, "parallel__pp": pp, "parallel__dp": dp, "parallel__vpp": vpp}
    layout["parallel__sp"] = tp > 1 and chance.random() < 0.5
    layout["parallel__zero"] = chance.choice((0, 1, 2))
    layout["parallel__schedule"] = chance.choice(("gpipe", "1f1b")) if vpp == 1 else "interleaved_1f1b"
    layout["model__block"] = chance.choice(BLOCKS.names())
    layout["model__num_layers"] = max(pp * vpp, 2)
    layout["overlap__bucket_bytes"] = chance.choice((1, 20_000, 1 << 30))
    layout["batch__global"] = dp * chance.randint(1, 5)
    return layout | {f"overlap__{axis}": chance.random() < 0.8 for axis in ("tp", "pp", "dp")}


def delayed(rank: Rank, configs: dict[int, RunConfig], transport: str) -> list[int]:
    """Return seeds whose random delays, in operations and completion threads, change the results of two steps.

    All configurations have the same mesh.
    """
    mesh, wrong = None, []
    for seed, config in configs.items():
        run = by_messages(rank, config, mesh, transport)
        mesh = run.mesh
        calm = outcome(run, 2)
        late = outcome_delayed(by_messages(rank, config, mesh), random.Random(f"{seed} {rank.rank}"))
        if late[0] != calm[0] or not np.array_equal(late[1], calm[1]):
            wrong.append(seed)
    return wrong


def outcome_delayed(run: Any, chance: random.Random) -> Outcome:
    from megascale.comm.progress import GlooWork

    def disturb(operation: str) -> None:
        if chance.random() < 0.2:
            time.sleep(chance.expovariate(1 / 1e-3))

    arrive = GlooWork.wait

    def arrive_late(messages: GlooWork) -> None:
        disturb("arrive")
        arrive(messages)

    GlooWork.wait = arrive_late  # type: ignore[method-assign]
    for group in run.mesh.groups:
        group.disturb = disturb
    late = outcome(run, 2)
    for group in run.mesh.groups:
        group.disturb = None
    GlooWork.wait = arrive  # type: ignore[method-assign]
    return late


def assert_delays_change_nothing(seeds: Iterable[int], folder: Path) -> None:
    worlds: dict[Any, dict[int, RunConfig]] = {}  # runs with equal meshes share a world
    for seed in seeds:
        chance = random.Random(seed)
        family, transport, layout = chance.choice((GPT, LLAMA)), chance.choice(TRANSPORTS), random_layout(chance)
        config = config_of(settings(family, folder, **layout), folder)
        p = config.parallel
        mesh = transport, p.tp, p.pp, p.dp, p.vpp > 1, config.model.tie_embeddings
        worlds.setdefault(mesh, {})[seed] = config
    for (transport, *_), configs in worlds.items():
        wrong = run_world(next(iter(configs.values())).world_size, delayed, configs, transport)
        assert not any(wrong), {seed: configs[seed] for seed in set().union(*wrong)}


@pytest.mark.slow
def test_delays_change_nothing(tmp_path: Path) -> None:
    """Cover tp, pp and dp with sp and ZeRO; the slow test below draws many more."""
    assert_delays_change_nothing((2, 23, 32, 52), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_delays_change_nothing_in_any_of_200(tmp_path: Path) -> None:
    assert_delays_change_nothing(range(100, 300), tmp_path)


def traffic(rank: Rank, config: RunConfig) -> Any:
    """Count (calls, bytes) of a step."""
    from megascale.train.step import train_step

    run = by_messages(rank, config)
    train_step(run, run.train_loader.batch(0))
    run.buffers.finish_param_gather()
    run.pipeline.finish_sends()
    return traffic_of(run, step=1)


@pytest.mark.parametrize("block", only_quick(BLOCKS.names(), "parallel_two_norms"))
@pytest.mark.parametrize("sequence", only_quick([False, True], True))
def test_pieces_move_the_same_bytes(sequence: bool, block: str, tmp_path: Path) -> None:
    layout = {"parallel__tp": 2, "parallel__sp": sequence, "model__block": block, "train__precision": "fp32"}
    layout["batch__global"] = 2
    trees = [settings(FAMILIES["gpt"], tmp_path, **layout, overlap__tp=on) for on in (True, False)]
    on, off = (run_world(2, traffic, config_of(tree, tmp_path)) for tree in trees)
    for pieces, wholes in zip(on, off, strict=True):
        assert {op: size for op, (_, size) in pieces["tp"].items()} == {op: s for op, (_, s) in wholes["tp"].items()}
        assert any(pieces["tp"][op][0] > wholes["tp"][op][0] for op in wholes["tp"])


@given(
    rows=st.integers(1, 5000),
    batch=st.integers(1, 700),
    size=st.sampled_from([2, 4, 8]),
    sequence=st.booleans(),
    width=st.sampled_from([8, 12288]),
)
def test_no_piece_on_a_gpu_has_a_small_gemm(rows: int, batch: int, size: int, sequence: bool, width: int) -> None:
    import torch

    from megascale.parallel.tp_overlap import TensorParallel

    group = Group(
        "tp", tuple(range(size)), 0, p2p_transport=P2PTransport(None, range(size), 0, lambda works, then: COMPLETED)
    )
    part = torch.empty(rows, batch, width, dtype=torch.bfloat16, device="meta")
    pieces = TensorParallel(group, sequence, gpu=True).num_pieces(part.shape, part.nbytes)
    assert pieces <= TensorParallel(group, sequence).num_pieces(part.shape, part.nbytes)
    assert not pieces or all((run.stop - run.start) * batch >= 512 for run in split_rows(rows, pieces))
    if rows * batch < 512 or (sequence and size > 4):
        assert pieces == 0
    elif rows >= 1024 and width > 8 and not (sequence and size > 4):
        assert pieces > 1


def test_fused_operators_need_many_rows() -> None:
    import torch
    import torch.distributed._symmetric_memory  # registers the fused operators

    from megascale.catalog.recipes import BLOCK_1D, ROW, TENSOR
    from megascale.comm.symmetric_memory import SymmetricMemory
    from megascale.ops.quantized import Quantized
    from megascale.parallel.tp_overlap import TensorParallel

    group = Group("tp", (0, 1), 0)
    axis = TensorParallel(group, sequence_parallel=True, symmetric_memory=SymmetricMemory(group))
    plain = torch.empty(1, 1, 8, device="meta")
    one, each, blocks = (Quantized(plain, plain, block) for block in (TENSOR, ROW, BLOCK_1D))
    for x, weight, rows in ((plain, plain, 512), (plain, plain, 513), (one, one, 513), (each, each, 516)):
        assert axis.fused_for([x], [weight, weight], rows)
    for x, weight, rows in (
        (plain, plain, 511), (one, one, 511), (each, each, 513), (plain, each, 512), (blocks, blocks, 512),
        (one, each, 512),
    ):  # fmt: skip
        assert not axis.fused_for([x], [weight], rows)
    assert not axis.fused_for([plain, plain], [plain, plain], 512)


ROWS_OF_GEMMS: dict[tuple[bool, int], list[list[int]]] = {  # by sequence parallelism and tokens
    (True, 4096): [[2048, 512, 512, 512, 512], [512, 512, 512, 512, 2048]],
    (True, 1000): [[1000], [1000]],
    (False, 4096): [[4096], [1024, 1024, 1024, 1024]],
    (False, 500): [[500], [500]],
}


@pytest.fixture(scope="module")
def gemms() -> list[dict[tuple[bool, int], Any]]:
    return run_world(2, rows_of_all_gemms)


@pytest.mark.parametrize("case", ROWS_OF_GEMMS)
def test_gemms_on_a_gpu_have_many_rows(case: tuple[bool, int], gemms: list[dict[tuple[bool, int], Any]]) -> None:
    for rank in gemms:
        (rows, results), (_, plain) = rank[case]
        assert rows == ROWS_OF_GEMMS[case]
        for result, same in zip(results, plain, strict=True):
            np.testing.assert_allclose(result, same, rtol=1e-12)


def rows_of_all_gemms(rank: Rank) -> dict[tuple[bool, int], list[Any]]:
    from megascale.comm.mesh import open_mesh
    from megascale.layout.topology import Topology

    group = open_mesh(Topology(tp=2), rank.rank, tied=False).tp
    send_messages(group)
    return {case: rows_of_gemms(rank, group, *case) for case in ROWS_OF_GEMMS}


def rows_of_gemms(rank: Rank, group: Group, sequence: bool, tokens: int) -> list[Any]:
    """Record the rows of every GEMM in a column-parallel and a row-parallel forward, and the results, with the GPU
    settings and without overlap.
    """
    import torch

    from megascale.parallel import tp_overlap
    from megascale.parallel.linear_gemms import LinearGemms
    from megascale.parallel.segments import finish
    from megascale.parallel.tensor import column_parallel_linear, row_parallel_steps

    tp_overlap.MIN_PIECE_BYTES = 512
    measured: list[Any] = []
    draw = torch.Generator().manual_seed(rank.rank)
    normal = partial(torch.randn, generator=draw, dtype=torch.float64)
    full, part = normal(tokens, 1, 8), normal(tokens // 2 if sequence else tokens, 1, 8)
    for axis in (
        tp_overlap.TensorParallel(group, sequence, gpu=True),
        tp_overlap.TensorParallel(group, sequence, overlap=False),
    ):
        rows = list[int]()

        class Counting(LinearGemms):
            def gemm(self, x: Any, *more: Any) -> Any:
                rows.append(x.shape[0])  # noqa: B023
                return super().gemm(x, *more)

            def gemm_out(self, out: Any, x: Any, *more: Any, **how: Any) -> None:
                rows.append(x.shape[0])  # noqa: B023
                super().gemm_out(out, x, *more, **how)

        layer = tp_overlap.LinearParams(torch.eye(8, dtype=torch.float64), None, Counting())
        first = column_parallel_linear(part, layer, axis)
        count = len(rows)
        second = finish(row_parallel_steps([full], [layer], axis))
        measured.append(([rows[:count], rows[count:]], [first.numpy(), second.numpy()]))
    return measured


def test_the_parallel_block_halves_the_collectives(tmp_path: Path) -> None:
    calls = {}
    for block in ("serial", "parallel"):
        tree = settings(GPT, tmp_path, parallel__tp=2, model__block=block, overlap__tp=False, batch__global=2)
        config = config_of(tree, tmp_path)
        (measured, _) = run_world(2, traffic, config)
        calls[block] = measured["tp"]["all_reduce"][0] // config.num_microbatches
    outside = 2 + 2  # embedding forward and head backward; two in the loss
    assert calls == {"serial": outside + 4 * GPT["num_layers"], "parallel": outside + 2 * GPT["num_layers"]}


def test_a_boundary_is_sent_in_shards(tmp_path: Path) -> None:
    """A rank sends 1 / tp of the activation: without sp a slice, with sp its shard."""
    for sequence in (False, True):
        layout = {"parallel__tp": 2, "parallel__pp": 2, "parallel__sp": sequence, "batch__global": 3}
        tree = settings(GPT | {"num_layers": 2}, tmp_path, train__precision="fp32", **layout)
        config = config_of(tree, tmp_path)
        m = config.model
        part = 4 * m.seq_length * config.batch.micro * m.hidden_size // 2
        for rank in run_world(4, traffic, config):
            sent = [rank[group].get("send", (0, 0)) for group in ("pp.up", "pp.down")]
            assert sum(calls for calls, _ in sent) == config.num_microbatches
            assert sum(size for _, size in sent) == config.num_microbatches * part
            if not sequence:  # the receivers all-gather: a message each way per micro-batch, one to every rank
                assert rank["tp"]["all_gather"] == (config.num_microbatches, config.num_microbatches * 2 * part)


def gathers(rank: Rank, config: RunConfig) -> list[tuple[str, float]]:
    """Record weight all-gathers in issue order: the bucket, and when its last wait began."""
    run = by_messages(rank, config)
    recorder, gathered = run.mesh.recorder, dict[int, tuple[str, float]]()
    record_wait = recorder.record_wait

    def wait(record: EventRecord, start: float) -> float:
        if (record.axis, record.name) == ("dp", "all_gather"):
            gathered[record.number] = record.label.part, start
        return record_wait(record, start)

    recorder.record_wait = wait
    curve_of(run, 2)
    return [gathered[number] for number in sorted(gathered)]


def test_weights_are_gathered_in_the_order_of_their_need(tmp_path: Path) -> None:
    layout = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "overlap__bucket_bytes": 20_000}
    layout["batch__global"] = 4
    for rank in run_world(4, gathers, config_of(settings(GPT, tmp_path, **layout), tmp_path)):
        assert len({part for part, _ in rank}) > 2
        needed = [time for _, time in rank]
        assert needed == sorted(needed)
