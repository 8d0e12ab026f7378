"""The step that a timeline opens on."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.core.storage import Location
from megascale.operate.show.step_events import opening_step, steps_with_events
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.store.tables import rows


@pytest.mark.parametrize(
    ("tags", "opened"),
    [
        (["", "", "", "checkpoint", ""], 3),
        (["", "", "", "", ""], 4),
        (["first step", "", "gc", "checkpoint", ""], 2),
        (["first step", "gc", "checkpoint", "checkpoint", ""], 4),
    ],
)
def test_a_timeline_opens_on_the_newest_ordinary_step(tmp_path: Path, tags: list[str], opened: int) -> None:
    """Rank 1 has no tags, and has not ended step 5."""
    store = Location(str(tmp_path / "events"))
    for rank, steps in ((0, 5), (1, 4)):
        columns = {"rank": rank, "step": list(range(1, steps + 1))}
        marks = tags if rank == 0 else [""] * steps
        write_rows(store, TableFile("steps", f"n{rank}", 0, 1, 2), rows("steps", steps, **columns, tags=marks))
        write_rows(store, TableFile("events", f"n{rank}", 0, 1, 2), rows("events", steps, **columns))
        write_rows(store, TableFile("ranks", f"n{rank}", 0, 1, 2), rows("ranks", 1, rank=rank, world=2))
    offered = steps_with_events(tmp_path)
    assert offered == [1, 2, 3, 4, 5]
    assert opening_step(tmp_path, offered) == opened


def test_a_run_without_events_opens_on_no_step(tmp_path: Path) -> None:
    assert opening_step(tmp_path, []) is None
