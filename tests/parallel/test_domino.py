"""Domino: each half of a micro-batch computes during the collectives of the other, with the same bytes in all."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.topology import Coord
from megascale.plan.account.traffic import step_traffic
from megascale.record.label import Label
from tests.marks import only_quick, only_quick_rows
from tests.parallel.test_tp_overlap import by_messages
from tests.recorded_events import forget_events
from tests.runs import MODELS, build_run, builds, config_of, curve_of, settings, traffic_of
from tests.worlds import run_world

Log = list[tuple[str, str]]
"""(start or end, collective), and (gemm, "")."""


def configure(family: str, folder: Path, tp: bool | str = "domino", **changes: Any) -> RunConfig:
    """Return a configuration of one micro-batch of two sequences a step."""
    keys = {"parallel__tp": 2, "batch__micro": 2, "batch__global": 2, "overlap__tp": tp, **changes}
    return config_of(settings(MODELS[family], folder, **keys), folder)


def noted_step(rank: Rank, config: RunConfig) -> Log:
    """Train a step; return the GEMMs of linear layers, and the starts and ends of their collectives, in order."""
    from megascale.model.modules import Linear
    from megascale.parallel.linear_gemms import LinearGemms
    from megascale.train.step import train_step

    log: Log = []

    class Noting(LinearGemms):
        def gemm(self, *args: Any) -> Any:
            log.append(("gemm", ""))
            return super().gemm(*args)

        def accumulate_wgrad(self, *args: Any) -> Any:
            log.append(("gemm", ""))
            return super().accumulate_wgrad(*args)

    run = build_run(rank, config)
    for module in run.stages[0].modules():
        if isinstance(module, Linear):
            module.params = module.params._replace(gemms=Noting())
    issue = run.mesh.tp.issue

    def noting(operation: str, label: Any, *args: Any, wait: bool) -> Any:
        name = f"{operation} {Label.from_part(label).text()}"
        name += f" {sum(entry == ('start', f'{name} {half}') for entry in log for half in '01')}"
        work = issue(operation, label, *args, wait=wait)
        log.append(("start", name))

        def end() -> None:
            log.extend([] if ("end", name) in log else [("end", name)])
            work.wait()

        if wait:
            end()
        return SimpleNamespace(wait=end)

    run.mesh.tp.issue = noting
    train_step(run, run.train_loader.batch(0))
    return [entry for entry in log if entry[0] == "gemm" or "layer " in entry[1]]


EXPOSED = {
    "serial": ["all_gather layer 0 qkv 0", "reduce_scatter layer 3 down 1", "all_gather layer 3 down gradient 0"],
    "parallel": [
        "all_gather layer 0 qkv and up 0", "reduce_scatter layer 3 out and down 1",
        "all_gather layer 3 out and down gradient 0",
    ],
}  # fmt: skip
"""The first collective of a forward, its last, and the first of a backward, with sequence parallelism."""


@pytest.mark.parametrize("block", EXPOSED)
@pytest.mark.parametrize("sequence", [False, True])
def test_every_collective_but_the_ends_has_a_gemm_beside_it(sequence: bool, block: str, tmp_path: Path) -> None:
    config = configure("llama", tmp_path, parallel__sp=sequence, model__block=block)
    log, other = run_world(2, noted_step, config)
    assert log == other, "ranks have one order"
    sent = [(at, name) for at, (kind, name) in enumerate(log) if kind == "start"]
    bare = [name for at, name in sent if ("gemm", "") not in log[at : log.index(("end", name))]]
    assert bare == (EXPOSED[block] if sequence else [EXPOSED[block][1].replace("reduce_scatter", "all_reduce")])
    of_a_layer = (10 if sequence else 4) // (1 if block == "serial" else 2)
    assert len(sent) == 2 * of_a_layer * config.model.num_layers


@pytest.mark.parametrize(
    ("sequence", "transport"),
    only_quick_rows(itertools.product([False, True], ["messages", "backend"]), (True, "messages"), (False, "backend")),
)
def test_it_is_the_same_run_across_hosts(sequence: bool, transport: str, tmp_path: Path) -> None:
    configs = [configure("gpt", tmp_path, tp, parallel__sp=sequence) for tp in (False, "domino")]
    for whole, halves in run_world(2, curves_across_hosts, configs, transport):
        assert all(pair == pytest.approx(other, rel=1e-12) for pair, other in zip(halves, whole, strict=True))


def curves_across_hosts(rank: Rank, configs: list[RunConfig], transport: str) -> list[Any]:
    """Train three steps of each configuration, with the transports of groups of several hosts."""
    whole = by_messages(rank, configs[0], transport=transport)
    return [curve_of(run, 3) for run in (whole, build_run(rank, configs[1], whole.mesh))]


def traffic(rank: Rank, configs: list[RunConfig]) -> list[Any]:
    """Count (calls, bytes) over tp in the second step of runs of one layout."""
    from megascale.train.step import train_step

    found = []
    for run in builds(rank, configs):
        forget_events(run.mesh.recorder)
        for consumed in (0, 2):
            train_step(run, run.train_loader.batch(consumed))
        run.buffers.finish_param_gather()
        found.append(traffic_of(run, step=2)["tp"])
    return found


@pytest.mark.parametrize("recompute", only_quick(["none", "selective", "full"], "full"))
@pytest.mark.parametrize("sequence", only_quick([False, True], True))
@pytest.mark.parametrize("family", only_quick(MODELS, "llama"))
def test_twice_the_calls_move_the_same_bytes(family: str, sequence: bool, recompute: str, tmp_path: Path) -> None:
    keys = {"parallel__sp": sequence, "train__recompute": recompute, "train__precision": "fp32"}
    ways: tuple[bool | str, ...] = (False, "domino")
    configs = [configure(family, tmp_path, tp, **keys) for tp in ways]
    layers_less = configure(family, tmp_path, False, **keys, model__num_layers=1)
    for off, on in run_world(2, traffic, configs):
        for operation, (calls, size) in off.items():
            assert on[operation][1] == size
            per_layer = calls - planned(layers_less).get(operation, (0, 0))[0]  # of three layers
            assert on[operation][0] - calls == per_layer * 4 / 3
        assert [on, off] == [planned(config) for config in reversed(configs)]


def planned(config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return (calls, bytes) over tp of a step, by the plan's formulas."""
    counts = step_traffic(config, Coord(0, 0, 0, 0))
    return {operation: sent for (group, operation), sent in counts.items() if group == "tp"}


def test_calls_bytes_flops_and_memory_equal_the_dry_run(tmp_path: Path) -> None:
    from tests.plan.account.test_against_dry_run import compare

    sizes = {"hidden_size": 1024, "num_heads": 8, "ffn_size": 4096, "seq_length": 1024}
    keys = {f"model__{key}": size for key, size in sizes.items()} | {"train__precision": "bf16", "parallel__sp": True}
    for changes in ({}, {"train__recompute": "full", "parallel__pp": 2}):
        _, error = compare(configure("llama", tmp_path, **keys, **changes), 0)
        assert -0.03 < error < 0.05, changes


@pytest.mark.parametrize("recipe", only_quick(["static", "blockwise"], "static"))
def test_scales_do_not_depend_on_the_halves(recipe: str, tmp_path: Path) -> None:
    """Blocks of tokens are of one sequence."""
    sizes = {"hidden_size": 256, "ffn_size": 512, "num_kv_heads": 4, "seq_length": 128}
    keys: dict[str, Any] = {f"model__{key}": size for key, size in sizes.items()}
    keys |= {"parallel__sp": True, "train__precision": "fp8", "fp8__recipe": recipe, "fp8__first_layers_bf16": 0}
    configs = [configure("llama", tmp_path, tp, **keys) for tp in (False, "domino")]
    for whole, halves in run_world(2, curves, configs):
        assert halves[0] == pytest.approx(whole[0], rel=1e-5), "the first step quantizes equal operands"


def curves(rank: Rank, configs: list[RunConfig]) -> list[Any]:
    """Train three steps of each configuration."""
    return [curve_of(run, 3) for run in builds(rank, configs)]


def test_a_split_backward_is_the_same_run(tmp_path: Path) -> None:
    keys = {"parallel__sp": True, "parallel__pp": 2, "batch__global": 8}
    configs = [configure("gpt", tmp_path, **keys, parallel__schedule=name) for name in ("1f1b", "interleaved_zb")]
    for whole, split in run_world(4, curves, configs):
        assert split == whole
