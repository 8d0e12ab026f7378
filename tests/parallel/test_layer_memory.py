"""Policies of layers for what they save, `train.memory`: every one is the same run bit for bit, and bytes leave the
device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.device import Device, PlainBuffers
from megascale.parallel.activation_media import HostMemory
from megascale.plan.account.memory import JobMemory
from tests.marks import only_quick
from tests.memory import held_bytes
from tests.parallel.test_activation_store import LateBuffers, OtherBuffers
from tests.parallel.test_recompute import FP8_MODEL
from tests.parallel.test_tp_overlap import Outcome, outcome
from tests.runs import GEMMA2, GPT, LLAMA, NEOX, builds, config_of, settings
from tests.worlds import run_world

V: dict[str, Any] = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zb_v"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "tp2 sp domino": {"parallel__tp": 2, "parallel__sp": True, "overlap__tp": "domino", "batch__micro": 2},
    "pp2 gpipe": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "pp2 vpp2 dp2 zero2": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2},
    "pp2 v": V,
    "pp2 v dp2 zero3 forward": V | {"parallel__dp": 2, "parallel__zero": 3, "parallel__reshard": "forward"},
    "dp2 zero3": {"parallel__dp": 2, "parallel__zero": 3},
    "cp2 ring pp2": {"parallel__cp": 2, "parallel__pp": 2, "model__dropout": 0.0},
    "chunks pp2": {
        "data__sequence_chunk_tokens": 4, "data__sequence_chunks_saved": 2, "parallel__pp": 2, "model__dropout": 0.0,
    },
    "hybrid pp2": {
        "parallel__hybrid_dp": True, "parallel__dp": 2, "parallel__pp": 2, "data__max_tokens_per_rank": 8,
        "data__attention_mask": "document", "data__document_length": 5, "model__dropout": 0.0,
    },
    "hybrid pp2, more micro-batches than tokens ask for": {
        "parallel__hybrid_dp": True, "parallel__dp": 2, "parallel__pp": 2, "data__max_tokens_per_rank": 16,
        "data__attention_mask": "document", "data__document_length": 8, "model__dropout": 0.0, "batch__global": 2,
    },
    "documents": {"data__attention_mask": "document", "data__document_length": 5},
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    {"model": GPT, "train__precision": "fp32"},
    {"model": LLAMA, "train__precision": "bf16"},
    {"model": GEMMA2, "train__precision": "fp64"},
    {"model": NEOX, "train__precision": "fp32"},
]
Keys = dict[str, Any]
MIXED: Keys = {"train__memory": ["host", "full", "nvme", "selective"]}
OFFLOAD: Keys = {"train__memory": ["full_host"]}
POLICIES: list[Keys] = [
    *({"train__memory": policies} for policies in (["host"], ["nvme"], ["selective", "keep", "host"])), MIXED, OFFLOAD,
    {"train__memory": ["keep", "keep", "full_host", "full"]},
]  # fmt: skip
SHARES: list[Keys] = [
    *({"train__memory": policies} for policies in (["host"], [{"host": 1 / 3}], ["keep", {"nvme": 2 / 3}])),
    {"train__memory": [{"host": 2 / 3}, "nvme"]}, OFFLOAD,
]  # fmt: skip


def trained(rank: Rank, configs: list[RunConfig]) -> list[Outcome]:
    """Train every configuration; copies in host memory alone happen as late as they may. The memory of offloaded inputs
    is allocated before the first step, and has the bytes of the formula.
    """
    results, made = list[Outcome](), list[LateBuffers]()

    def late_buffers(device: Device) -> PlainBuffers:
        made.append(LateBuffers())
        return PlainBuffers() if configs[len(results)].train.memory_dir else made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "host_buffers", late_buffers)
        for run in builds(rank, configs):
            inputs_move = run.config.train.memory == ["full_host"]
            before = made[-1].allocated if inputs_move else 0
            results.append(outcome(run, 2))
            if inputs_move:
                assert made[-1].allocated == before == JobMemory(run.config).moved_bytes(run.mesh.coord.pp, "host")
                free = run.pipeline.store.media["host"].pool.free
                assert run.config.parallel.hybrid_dp or sum(map(len, free)) == before
    return results


def check(cases: list[Keys], policies: list[Keys], folder: Path, **layout: Any) -> None:
    """Compare each policy with keep."""
    configs = []
    for case in cases:
        for policy in ({"train__memory": ["keep"]}, *policies):
            keys = {"model__dropout": 0.1} | policy | layout
            keys |= {"train__memory_dir": str(folder)} if "nvme" in str(policy) else {}
            keys |= {name: value for name, value in case.items() if name != "model"}
            if "model__dropout" in layout:
                keys["model__dropout"] = layout["model__dropout"]
            configs.append(config_of(settings(case["model"], folder, **keys), folder))
    count = 1 + len(policies)
    for outcomes in run_world(configs[0].world_size, trained, configs):
        for at in range(0, len(outcomes), count):
            (curve, weights), others = outcomes[at], outcomes[at + 1 : at + count]
            for policy, other in zip(policies, others, strict=True):
                assert other[0] == curve, (cases[at // count], policy)
                assert np.array_equal(other[1], weights), (cases[at // count], policy)
    assert not [path for path in folder.iterdir() if path.name.startswith("tmp")], "files have no name"


@pytest.mark.parametrize("layout", only_quick(list(LAYOUTS), "pp2 vpp2 dp2 zero2"))
def test_policies_are_bit_equal(layout: str, tmp_path: Path) -> None:
    cases = CASES if layout not in ("one", "pp2 vpp2 dp2 zero2") else CASES[:2]
    check(cases, POLICIES, tmp_path, **LAYOUTS[layout])


@pytest.mark.parametrize("layout", only_quick(["one", "tp2 sp", "pp2 v", "dp2 zero3"], "one"))
def test_shares_of_tiles_are_bit_equal(layout: str, tmp_path: Path) -> None:
    check(CASES[:2], SHARES, tmp_path, train__mlp_tiles=3, **LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"parallel__dp": 2, "parallel__ep": 2}, {"parallel__pp": 2}], ids=str)
def test_layers_with_experts_are_bit_equal(more: dict[str, Any], tmp_path: Path) -> None:
    keys = {"model__experts": 4, "model__dense_layers": 1, "model__dropout": 0.0} | more
    check(CASES[1:2], [*POLICIES, {"train__memory": ["full", "host"]}], tmp_path, **keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"model__mtp_layers": 1}, {"model__exits": [2]}, {"model__attention_sinks": True}, {"model__block": "parallel"}],
    ids=str,
)
def test_other_models_are_bit_equal(more: dict[str, Any], tmp_path: Path) -> None:
    check(CASES[1:2], [POLICIES[0], MIXED, OFFLOAD], tmp_path, model__dropout=0.0, **more)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_codes_are_bit_equal(recipe: str, tmp_path: Path) -> None:
    """What the GEMMs of a recipe save moves too, and amaxes that a kernel has left with a tensor are found again."""
    case = {"model": FP8_MODEL, "train__precision": "fp8", "fp8__recipe": recipe}
    check([case], [POLICIES[0], {"train__memory": ["nvme", "full"]}], tmp_path, model__dropout=0.0)


def held(rank: Rank, configs: list[RunConfig]) -> list[tuple[int, int]]:
    """Bytes on the device after the forward of a micro-batch, and most bytes elsewhere. An evaluation moves nothing."""
    results = []
    for run in builds(rank, configs):
        (stage,), micro_batch, store = run.stages, run.train_loader.batch(0).micro_batches[0], run.pipeline.store
        if store is not None:
            store.media = {"host": HostMemory(OtherBuffers())}
        stage(None, micro_batch)  # fills caches
        size = held_bytes(lambda stage=stage, micro_batch=micro_batch: stage(None, micro_batch))
        results.append((size, 0 if store is None else store.media["host"].pool.nbytes))
        if store is not None:
            assert store.end_forward() is not None
            with torch.no_grad():
                stage(None, micro_batch)
            assert store.end_forward() is None
    return results


WIDE = {"train__precision": "fp32", "model__seq_length": 128, "model__hidden_size": 64, "model__ffn_size": 128}


def bytes_of(policies: list[Any], folder: Path, **more: Any) -> list[tuple[int, int]]:
    keys = [each if isinstance(each, dict) else {"train__memory": each} for each in policies]
    trees = [settings(GPT, folder, **each, **WIDE, **more) for each in keys]
    return run_world(1, held, [config_of(tree, folder) for tree in trees])[0]


def test_what_moves_leaves_the_device_but_for_the_last_block(tmp_path: Path) -> None:
    """The next block that moves frees what the one before it has saved."""
    moving: list[list[Any]] = [["host", "keep", "keep", "keep"], ["host", "host", "host", "keep"], ["host"]]
    (kept, none), (first, one), (most, three), (least, four) = bytes_of([["keep"], *moving], tmp_path)
    assert none == 0 and one > 0 and (three, four) == (3 * one, 4 * one)
    assert (kept - first, kept - most, kept - least) == (0, 2 * one, 3 * one)


def test_of_the_inputs_of_blocks_one_stays_on_the_device(tmp_path: Path) -> None:
    (kept, _), (offloaded, host) = bytes_of([["full"], OFFLOAD], tmp_path)
    size, layers = 4 * 128 * 64, 4
    assert (kept - offloaded, host) == ((layers - 1) * size, layers * size)


def test_bytes_that_move_grow_with_the_share(tmp_path: Path) -> None:
    """The inner tensors of a tile move, or are recomputed; nothing else changes."""
    shares = [0.25, 0.5, 0.75, 1.0]
    policies: list[list[Any]] = [[{"host": share}] for share in shares]
    (kept, _), *held_of = bytes_of([["keep"], *policies], tmp_path, train__mlp_tiles=4)
    moved = [bytes_moved for _, bytes_moved in held_of]
    steps = np.diff(moved)
    inner = 4 * 32 * 2 * 128 * 4  # blocks, tokens of a tile, before and after the activation, ffn_size, fp32
    assert list(steps) == [inner] * 3
    assert kept > max(size for size, _ in held_of)
