"""Fewer data-parallel ranks after the loss of a node: which layout, and the same loss curve."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.cli.smaller_layout import smaller_layout
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.operate.driver.job_state import SmallerLayout
from tests.jobs import Job, curve, finish, job_config
from tests.runs import GPT


def config(folder: Path, **overrides: object) -> RunConfig:
    return load_config(str(job_config(folder, GPT, **overrides)))


@pytest.mark.parametrize(
    ("dp", "batch", "ranks_per_node", "nodes", "smaller"),
    [
        (4, 12, 2, 3, (3, 6, 3)),
        (4, 8, 2, 3, (2, 4, 2)),  # 3 does not divide the batch
        (4, 8, 4, 1, (2, 4, 1)),
        (4, 8, 8, 1, (2, 4, 1)),
        (2, 8, 2, 1, (1, 2, 1)),
        (6, 12, 4, 2, (4, 8, 2)),
        (6, 12, 4, 1, (2, 4, 1)),
        (1, 8, 2, 4, None),
        (4, 8, 1, 1, None),  # a replica needs two ranks
    ],
)
def test_the_largest_legal_dp_that_fits(
    tmp_path: Path, dp: int, batch: int, ranks_per_node: int, nodes: int, smaller: tuple[int, int, int] | None
) -> None:
    run = config(tmp_path, parallel__tp=2, parallel__dp=dp, batch__global=batch, batch__micro=1)
    layout = None
    if smaller is not None:
        dp, world_size, nodes_left = smaller
        layout = SmallerLayout(nodes_left, world_size, (f"parallel.dp={dp}",))
    assert smaller_layout(run, ranks_per_node, nodes) == layout


def test_experts_spread_over_the_ranks_that_are_left(tmp_path: Path) -> None:
    """A rank has more of them where ep no longer divides the ranks of a stage."""
    experts = {"model__experts": 8, "model__experts_per_token": 2, "model__bias": False}
    layout = {"parallel__tp": 1, "parallel__dp": 8, "batch__global": 24, "batch__micro": 1}
    for ep, overrides in ((8, ("parallel.dp=6", "parallel.ep=2")), (2, ("parallel.dp=6",))):
        run = config(tmp_path, **experts, **layout, parallel__ep=ep)
        smaller = smaller_layout(run, ranks_per_node=1, nodes=7)
        assert smaller is not None and smaller.overrides == overrides


def test_a_smaller_layout_is_without_the_faults_of_ranks_that_it_lacks(tmp_path: Path) -> None:
    faults = "kill rank=1 step=2; kill rank=7 step=3"
    run = config(tmp_path, parallel__tp=2, parallel__dp=4, batch__global=8, batch__micro=1, fault__inject=faults)
    layout = smaller_layout(run, ranks_per_node=2, nodes=3)
    assert layout is not None
    assert layout.overrides == ("parallel.dp=2", "fault.inject=kill rank=1 step=2")
    path = job_config(tmp_path, GPT, parallel__tp=2, batch__global=8, batch__micro=1, fault__inject=faults)
    load_config(str(path), layout.overrides, layout.world_size)


@pytest.mark.slow
def test_the_curve_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    wide = {"parallel__dp": 4, "parallel__zero": 1, "checkpoint__every": 2, "train__precision": "fp64"}
    undisturbed = curve(finish(job_config(tmp_path / "wide", GPT, **wide)))
    path = job_config(tmp_path / "lost", GPT, **wide)
    layout = smaller_layout(load_config(str(path)), ranks_per_node=1, nodes=3)
    assert layout is not None and layout.overrides == ("parallel.dp=2",)
    job = Job(path)
    job.wait_for_step(5)
    job.kill()
    continued = curve(finish(path, *layout.overrides))
    assert [step for step, _, _ in continued] == [step for step, _, _ in undisturbed]
    for ours, theirs in zip(continued, undisturbed, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
