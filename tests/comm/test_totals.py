"""Job-wide reductions: equal bits on every rank, in a small job by a single all-reduce, in a large job by axis."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.marks import only_quick
from tests.runs import GPT, build_run, config_of, settings
from tests.worlds import run_world

NUMBERS = 40


def own(rank: int) -> list[float]:
    """Numbers whose sum depends on the order in which they are added."""
    draw = random.Random(rank)
    return [draw.uniform(-1, 1) * 10.0 ** draw.randint(-8, 8) for _ in range(NUMBERS)]


def summed(rank: Rank, layout: dict[str, int], at_once: int) -> tuple[list[float], list[float], int, int]:
    """Return sums, maxima, an integer's sum, and the size of the largest group with a transport. In a large job
    (`at_once` 1) collectives are gloo's.
    """
    import torch

    from megascale.comm import mesh as module
    from megascale.comm.totals import max_over_job, sum_over_job
    from megascale.layout.topology import Topology
    from tests.runs import send_messages

    module.MAX_FLAT_REDUCE_RANKS = at_once
    mesh = module.open_mesh(Topology(**layout), rank.rank, tied=False)
    for group in mesh.groups:
        if at_once == 1:
            send_messages(group, backend=True)
    sums = torch.tensor(own(rank.rank), dtype=torch.float64)
    most, count = sums.clone(), torch.tensor(rank.rank)
    sum_over_job(mesh, sums)
    max_over_job(mesh, most)
    sum_over_job(mesh, count)
    widest = max(group.size for group in mesh.groups if group.transport is not None)
    return sums.tolist(), most.tolist(), int(count), widest


LAYOUTS = [{"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}, {"pp": 4}, {"pp": 2, "dp": 2}]


@pytest.mark.parametrize("at_once", [8, 1])
@pytest.mark.parametrize("layout", only_quick(LAYOUTS, LAYOUTS[1]), ids=str)
def test_every_rank_has_the_same_bits(layout: dict[str, int], at_once: int) -> None:
    ranks = run_world(4, summed, layout, at_once)
    columns = list(zip(*map(own, range(4)), strict=True))
    for sums, most, count, widest in ranks:
        assert sums == ranks[0][0]
        assert sums == pytest.approx([math.fsum(column) for column in columns], rel=1e-9, abs=1e-6)
        assert most == [max(column) for column in columns]
        assert count == 6
        assert widest == (4 if at_once == 8 else max(layout.values()))


def told(rank: Rank, at_once: int) -> list[bytes]:
    """Return the results of broadcasting rank 0's bytes."""
    import torch

    from megascale.comm import mesh as module
    from megascale.comm.totals import broadcast_bytes
    from megascale.layout.topology import Topology

    module.MAX_FLAT_REDUCE_RANKS = at_once
    mesh = module.open_mesh(Topology(tp=2, dp=2), rank.rank, tied=False)
    data = random.Random(1).randbytes(100_001) if rank.rank == 0 else b"not this"
    return [broadcast_bytes(mesh, data, torch.device("cpu")), broadcast_bytes(mesh, data[:0], torch.device("cpu"))]


@pytest.mark.parametrize("at_once", [8, 1])
def test_the_first_ranks_bytes_reach_all(at_once: int) -> None:
    assert run_world(4, told, at_once) == [[random.Random(1).randbytes(100_001), b""]] * 4


def life(rank: Rank, config: Any) -> tuple[int, int, int]:
    """Build, step, evaluate, save and load, as a large job does. Returns the number of collectives of the default group
    before, after, and after a barrier, which shows that the count works.
    """
    import torch.distributed as dist

    from megascale.comm import mesh as module
    from megascale.train.evaluate import evaluate
    from megascale.train.finite_check import check_state_finite
    from megascale.train.step import train_step

    def count() -> int:
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]

    def message(operation: Any, tensor: Any, peer: int, group: Any = None, tag: int = 0) -> Any:
        assert group is not None, "a message of the default group"
        return plain(operation, tensor, peer, group, tag)

    module.MAX_FLAT_REDUCE_RANKS, plain, dist.P2POp = 1, dist.P2POp, message  # type: ignore[misc, assignment]
    before = count()
    run = build_run(rank, config)
    train_step(run, run.train_loader.batch(0))
    run.buffers.finish_param_gather()
    run.pipeline.finish_sends()
    evaluate(run)
    check_state_finite(run)
    assert run.checkpoints.save(run.progress) is not None
    again = build_run(rank, config)
    found = again.checkpoints.resume()
    assert found is not None and found.progress.step == 1
    after = count()
    dist.barrier()
    return before, after, count()


@pytest.mark.parametrize("layout", only_quick(LAYOUTS[:2], LAYOUTS[0]), ids=str)
def test_a_large_job_never_uses_the_communicator_of_all_ranks(layout: dict[str, int], tmp_path: Path) -> None:
    sizes = {f"parallel__{axis}": size for axis, size in layout.items()}
    more = {"train__eval_every": 1, "train__eval_steps": 1, "checkpoint__every": 1}
    config = config_of(settings(GPT, tmp_path, **sizes, **more), tmp_path)
    for before, after, shown in run_world(4, life, config):
        assert before == after < shown
