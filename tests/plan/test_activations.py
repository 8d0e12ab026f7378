"""Bytes of activations are those that autograd saves, storage by storage, in every step of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.schedules import SCHEDULES
from megascale.core.rank import Rank
from megascale.plan.activations import kept_bytes
from megascale.plan.orders import Orders
from megascale.schedule.lower import AHEAD
from megascale.schedule.runs import runs_of
from tests.marks import only_quick
from tests.memory import held_bytes
from tests.runs import FAMILIES, build_run, builds, config_of, settings
from tests.worlds import run_world


class Watch:
    """Follows what autograd saves. `kept`: by each chunk for a micro-batch when its forward ends, once a storage;
    `peak`: the most at once.
    """

    def __init__(self, run: Any) -> None:
        self.kept: dict[int, set[int]] = {}
        self.peak = self._now = 0
        self._uses: dict[int, int] = {}
        self._shared = {bucket.weights.untyped_storage().data_ptr() for bucket in run.gradients.buckets}
        m = run.config.model
        if m.position == "rope":  # one table for all layers and micro-batches
            from megascale.ops.rope import rope_table

            wide = torch.promote_types(run.formats[0], torch.float32)
            table = rope_table(m.seq_length, m.head_dim, m.rope_theta, wide, run.device.torch)
            self._shared |= {t.untyped_storage().data_ptr() for t in table}
        for chunk, stage in enumerate(run.stages):
            run.pipeline.stages[chunk] = self._watched(stage, chunk)

    def _watched(self, stage: Any, chunk: int) -> Any:
        def forward(*arguments: Any) -> Tensor:
            before = self._now
            out = stage(*arguments)
            self.kept.setdefault(chunk, set()).add(self._now - before)
            return out

        return forward

    def pack(self, tensor: Tensor) -> Any:
        return Saved(self, tensor) if tensor.untyped_storage().data_ptr() not in self._shared else tensor

    def unpack(self, saved: Any) -> Tensor:
        return saved.tensor if isinstance(saved, Saved) else saved

    def change(self, storage: Any, by: int) -> None:
        key = storage.data_ptr()
        self._uses[key] = self._uses.get(key, 0) + by
        if self._uses[key] == (1 if by > 0 else 0):
            self._now += by * storage.nbytes()
            self.peak = max(self.peak, self._now)


class Saved:
    """A saved tensor. It goes when autograd lets go of it."""

    def __init__(self, watch: Watch, tensor: Tensor) -> None:
        self.watch, self.tensor = watch, tensor.detach()
        watch.change(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.watch.change(self.tensor.untyped_storage(), -1)


def watched(rank: Rank, configs: list[Any]) -> list[tuple[list[set[int]], int]]:
    """For each run the bytes that a micro-batch keeps on each chunk, and the peak in a step."""
    found = []
    for run in builds(rank, configs):
        watch = Watch(run)
        run.gradients.clear()
        run.scaling.begin(watch=False)
        with torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack):
            run.pipeline.run(run.train_order, run.train.batch(0))
        assert watch._now == 0
        list(run.gradients.finish())
        run.pipeline.finish_sends()
        found.append(([watch.kept[chunk] for chunk in sorted(watch.kept)], watch.peak))
    return found


OPERATIONS = ["attention", "norm", "activation"]
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"train__recompute": "full"},
    **{op: {"train__recompute": "selective", "train__recompute_ops": [op]} for op in OPERATIONS},
    "all operations": {"train__recompute": "selective", "train__recompute_ops": OPERATIONS},
}
VARIANTS = [
    {"train__precision": precision, "model__dropout": dropout, "model__block": block, "batch__micro": micro}
    for precision, dropout, block, micro in (
        ("fp32", 0.0, "serial", 2),
        ("bf16", 0.0, "parallel", 1),
        ("fp64", 0.1, "serial", 1),
        ("fp32", 0.1, "parallel", 2),
    )
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"parallel__tp": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "pp2 gpipe": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "pp2 vpp2": {"parallel__pp": 2, "parallel__vpp": 2},
    "tp2 sp pp2": {"parallel__pp": 2, "parallel__tp": 2, "parallel__sp": True},
}


EVERYWHERE = [f"{family} {layout}" for layout in LAYOUTS for family in FAMILIES]


@pytest.mark.parametrize("case", only_quick(EVERYWHERE, "llama one", "gpt pp2 vpp2"))
def test_what_autograd_saves(case: str, tmp_path: Any) -> None:
    family, layout = case.split(" ", 1)
    compare(FAMILIES[family], LAYOUTS[layout], VARIANTS, tmp_path)


FEWER = ("none", "full", "attention", "all operations")
WIDE = {"hidden_size": 128, "ffn_size": 256, "num_kv_heads": 4, "seq_length": 128}
EIGHT_BIT = [
    {
        "train__precision": "fp8", "fp8__recipe": recipe, "fp8__bf16_last": last, "model__dropout": dropout,
        "model__block": block,
    }
    for recipe, last, dropout, block in (
        ("tensorwise", 1, 0.0, "serial"),
        ("tensorwise", 0, 0.1, "parallel"),
        ("delayed", 0, 0.0, "parallel"),
        ("mu_unit", 0, 0.1, "serial"),
        ("rowwise", 1, 0.0, "serial"),
        ("blockwise", 0, 0.0, "serial"),
    )
]  # fmt: skip


@pytest.mark.parametrize("family", only_quick(FAMILIES, "llama"))
@pytest.mark.parametrize("layout", only_quick(["one", "tp2 sp"]))
def test_layers_in_eight_bits(layout: str, family: str, tmp_path: Any) -> None:
    variants = EIGHT_BIT if "tp2" not in layout else EIGHT_BIT[:-1]  # blocks of 128 are larger than a rank's part
    compare(FAMILIES[family] | WIDE | {"num_layers": 3}, LAYOUTS[layout], variants, tmp_path, FEWER)


@pytest.mark.parametrize("family", only_quick(FAMILIES, "llama"))
@pytest.mark.parametrize("layout", only_quick(["one", "pp2 vpp2"]))
def test_windows(layout: str, family: str, tmp_path: Any) -> None:
    variants = [
        *(variant | {"model__window": [5, 0]} for variant in VARIANTS),
        {"model__seq_length": 400, "model__window": [250, 3], "train__precision": "bf16"},
        {"model__window": 7} | EIGHT_BIT[0] | {f"model__{key}": value for key, value in WIDE.items()},
    ]
    compare(FAMILIES[family], LAYOUTS[layout], variants, tmp_path, FEWER)


def compare(
    model: dict[str, Any], layout: dict[str, Any], variants: list[dict[str, Any]], folder: Any,
    chosen: Sequence[str] = tuple(SETTINGS),
) -> None:  # fmt: skip
    """Each variant with each setting, of several chunks in the first: what is saved, and what is planned."""
    cases = [(name, variant) for name in chosen for variant in variants]
    several = {"train__recompute_chunks": [0]} if "parallel__vpp" in layout else {}
    where = {name: several if SETTINGS[name] else {} for name in chosen}
    trees = [settings(model, folder, **layout, **SETTINGS[name], **where[name], **more) for name, more in cases]
    configs = [config_of(tree, folder) for tree in trees]
    p = configs[0].parallel
    for rank, found in enumerate(run_world(configs[0].world, watched, configs)):
        for case, config, (kept, peak) in zip(cases, configs, found, strict=True):
            pp_rank = rank // (p.tp * config.dp)
            runs = runs_of(SCHEDULES[p.schedule].load(), p.pp, p.vpp, config.micro_batches)
            planned = kept_bytes(config, pp_rank).in_order(Orders(runs, p.pp, p.vpp).of(pp_rank, AHEAD))
            assert kept == [{size} for size in planned.kept], (case, rank)
            assert peak == planned.peak, (case, rank)


def held(rank: Rank, configs: list[Any]) -> list[tuple[int, int]]:
    """For each run the bytes that the allocator has given out after the forward of a micro-batch, and those planned."""
    found = []
    for config in configs:
        run = build_run(rank, config)
        (stage,), micro_batch = run.stages, run.train.batch(0).micro_batch(0)
        stage(None, micro_batch)  # caches are filled once
        bytes_held = held_bytes(lambda stage=stage, micro_batch=micro_batch: stage(None, micro_batch))
        found.append((bytes_held, kept_bytes(config, 0).kept[0]))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_else_is_held(family: str, tmp_path: Any) -> None:
    """What autograd does not know of, such as what is to be called again, holds nothing of its own."""
    sizes = FAMILIES[family] | {"hidden_size": 64, "seq_length": 64}
    trees = [settings(sizes, tmp_path, **SETTINGS[name], **more) for name in SETTINGS for more in VARIANTS]
    for found, planned in run_world(1, held, [config_of(tree, tmp_path) for tree in trees])[0]:
        assert planned <= found <= planned + 1024
