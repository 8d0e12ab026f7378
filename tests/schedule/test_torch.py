"""Lists of torch's pipelining, from its generators without stages: ours are equal, and the check accepts them."""

from __future__ import annotations

import hashlib

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action as TorchAction

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import Placement
from megascale.schedule.check import check_schedule
from megascale.schedule.ir import Action, Entry, Kind, Overlap, Schedule
from tests.schedule.orders import schedule_of

GENERATORS = {
    "interleaved_zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zb_v": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
SHAPES = {
    "interleaved_zb": [(2, 1, 8), (2, 2, 8), (3, 2, 2), (4, 1, 8), (4, 2, 8), (4, 3, 10), (8, 2, 16), (8, 4, 18)],
    "zb_v": [(1, 2, 1), (2, 2, 2), (2, 2, 8), (3, 2, 7), (4, 2, 3), (4, 2, 8), (8, 2, 16)],
    "dualpipev": [(1, 2, 2), (2, 2, 4), (3, 2, 6), (3, 2, 11), (4, 2, 10), (8, 2, 16), (8, 2, 21)],
}
CASES = [(name, *shape) for name, shapes in SHAPES.items() for shape in shapes]


def generated(name: str, p: int, v: int, m: int) -> list[list[TorchAction]]:
    """Run torch's generator for all ranks, and drop the bubbles."""
    schedule = object.__new__(GENERATORS[name])
    rounds = max(1, m // p)
    values = {
        "pp_group_size": p, "n_local_stages": v, "_num_stages": p * v, "num_stages": p * v, "_n_microbatches": m,
        "number_of_rounds": rounds, "microbatches_per_round": m // rounds,
    }  # fmt: skip
    vars(schedule).update(values)
    return [[action for action in schedule._calculate_single_rank_operations(rank) if action] for rank in range(p)]


def ours(actions: list[list[TorchAction]], placement: Placement) -> Schedule:
    def action(theirs: TorchAction) -> Action:
        _, chunk = placement.places[theirs.stage_index]
        return Action(Kind(theirs.computation_type.value), chunk, theirs.microbatch_index)

    def entry(theirs: TorchAction) -> Entry:
        return Overlap(*map(action, theirs.sub_actions)) if theirs.sub_actions else action(theirs)

    return [[entry(each) for each in order] for order in actions]


@pytest.mark.parametrize(("name", "p", "v", "m"), CASES)
def test_lists_equal_those_of_torch(name: str, p: int, v: int, m: int) -> None:
    compute, placement = schedule_of(name, p, v, m)
    theirs = ours(generated(name, p, v, m), placement)
    check_schedule(theirs, placement, m, SCHEDULES[name].facts)
    assert compute == theirs


@pytest.mark.parametrize(
    ("name", "p", "m", "digest"),
    [
        ("dualpipev", 4, 10, "e3e483bfb9948590199527e3ffd0baa6865a273b99a8383ee640cda1414ade92"),
        ("interleaved_zb", 2, 8, "d56036845c10efc4e21ea83335991e9fbc6185071f42eade4c9d74cf8e3eec69"),
    ],
)
def test_lists_equal_files_of_torch(name: str, p: int, m: int, digest: str) -> None:
    """The files dualpipev_4rank_10mb.csv and zb1p_2rank_2stagep_compute.csv of its tests, without bubbles. The second
    writes I as B.
    """
    kinds = str.maketrans("I", "B") if name == "interleaved_zb" else {}
    compute, placement = schedule_of(name, p, 2, m)

    def cell(rank: int, entry: Entry) -> str:
        if isinstance(entry, Overlap):
            return f"({cell(rank, entry.forward)};{cell(rank, entry.backward)})OVERLAP_F_B"
        return f"{placement.stage(rank, entry.chunk)}{entry.kind.translate(kinds)}{entry.microbatch}"

    rows = [",".join(cell(rank, entry) for entry in order) for rank, order in enumerate(compute)]
    assert hashlib.sha256("\n".join(rows).encode()).hexdigest() == digest
