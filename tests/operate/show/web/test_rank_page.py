"""What the page of a rank says where little is known."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from megascale.core.storage import Location
from megascale.operate.show.rank_details import read_rank_details
from megascale.operate.show.run_reader import RunReader
from megascale.operate.show.store_view import read_store_view
from megascale.operate.show.web.rank_page import state_facts
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.show.hung_runs import make_hung_run
from tests.operate.show.stores import make_stored_run


def test_a_rank_without_a_place_in_the_store(tmp_path: Path) -> None:
    run, fleet = make_stored_run(tmp_path, steps=20)
    (whole,) = (run / "events" / "ranks").iterdir()
    whole.unlink()
    first = {name: column[:4] for name, column in fleet.tables["ranks"].items()}
    write_rows(Location(f"{run}/events"), TableFile("ranks", "n0", 0, 0, 1), first)
    view, store = RunReader(run).read(), read_store_view(run)
    known, unknown = (dict(state_facts(view, store, read_rank_details(view, rank), ".")) for rank in (0, 7))
    assert (known["node"], known["compute beside its peers"][-1]) == ("n0000", "%")
    assert (unknown["node"], unknown["compute beside its peers"]) == ("unknown", "unknown")
    assert unknown["peak memory"] == "0 B", "its steps are known"


def test_totals_are_in_words(tmp_path: Path) -> None:
    run = make_hung_run(tmp_path)
    details = read_rank_details(RunReader(run).read(), 0)
    assert details.state is not None
    totals = {"checkpoint_time": 1795839288.25, "loss_tokens": 1048576.0, "loss": 2.4627900123}
    details = replace(details, state=replace(details.state, totals=totals))
    known = dict(state_facts(RunReader(run).read(), None, details, "."))
    assert re.fullmatch(r"2026-11-2\d \d\d:\d\d:48 [+-]\d{4}", known["checkpoint time"])
    assert (known["loss tokens"], known["loss"]) == ("1,048,576", "2.46279")
