"""The spread of the parts of a step over all ranks, in TensorBoard: least, median and largest, from the event store.

The collector of rank 0's node writes it, so that ranks have no part in it: no reduction, no message. A point has the
means of each rank over its ordinary steps since the last point. The newest step is left out, of which rows are missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megascale.operate.store.query import StoreError
from megascale.operate.store.reading import read_store
from megascale.operate.store.schema import STEP_AXIS, has_rare_tag
from megascale.operate.store.settings import StoreSettings
from megascale.record.events import COMPUTE, HOST_AXIS, PAUSE
from megascale.record.tensorboard_file import TensorBoardFile

EVERY_S = 30.0  # least seconds between points
MAX_SHARE = 0.01  # largest share of the time that reading the store may take: with many nodes points are farther apart
LAST_S = 1.0  # longest reading of the store, in seconds, that the end of a run waits for
FOLDER = "ranks"  # folder in the run's TensorBoard folder: TensorBoard shows it as a run of its own

_SPREAD = f"""
WITH mine AS (SELECT * FROM steps WHERE attempt = $attempt),
ordinary AS (
    SELECT * FROM step_parts
    WHERE attempt = $attempt AND step > $after AND step < (SELECT max(step) FROM mine)
        AND step NOT IN (SELECT step FROM mine WHERE {has_rare_tag("mine", 0.5)})
), counted AS (SELECT rank, count(DISTINCT step) AS steps FROM ordinary WHERE axis = 'step' GROUP BY rank),
by_rank AS (
    SELECT axis, name, min(step) AS first, max(step) AS last, sum(
        CASE WHEN axis = 'compute' THEN total_ns - exposed_ns
            WHEN axis = 'step' OR name = '{PAUSE}' THEN total_ns ELSE exposed_ns END
    ) / 1e9 / any_value(steps) AS s
    FROM ordinary JOIN counted USING (rank) GROUP BY rank, axis, name
)
SELECT axis, name, min(s), median(s), max(s), min(first), max(last), (
    SELECT min(end_ns) FROM mine WHERE step >= (SELECT max(step) FROM ordinary)
) FROM by_rank GROUP BY axis, name ORDER BY axis, name
"""


class RankSpread:
    """Writes the points of an attempt. Methods raise OSError."""

    def __init__(self, settings: StoreSettings, attempt: int) -> None:
        self._settings = settings
        self._attempt = attempt
        self._step = 0  # the last that a point has
        self._after_s = time.time() - settings.interval_s  # rows of later steps are written after it
        self._next, self._took_s = time.monotonic() + EVERY_S, 0.0
        self._file: TensorBoardFile | None = None
        self._is_last = False

    def write_if_due(self, *, last: bool = False) -> None:
        """Write a point if it is time for one, or for the `last` one."""
        due = self._took_s <= LAST_S if last else time.monotonic() >= self._next
        if due and not self._is_last:
            self.write()
        self._is_last = self._is_last or last

    def write(self) -> None:
        """Write a point, unless no rank has finished a step since the last."""
        began = time.monotonic()
        try:
            given = {"attempt": self._attempt, "after": self._step}
            newest_s = max(0.0, time.time() - self._after_s) + self._settings.interval_s
            rows = read_store(
                self._settings.url, lambda store: store.execute(_SPREAD, given).fetchall(), last_s=newest_s, threads=1,
                tables=("steps", "step_parts"), search=False,
            ).value  # fmt: skip
        except StoreError as error:
            raise OSError(str(error)) from None
        finally:
            self._took_s = time.monotonic() - began
            self._next = began + max(EVERY_S, self._took_s / MAX_SHARE)
        if rows:
            last, end_ns = max(row[-2] for row in rows), rows[0][-1]
            if self._file is None:
                first = min(row[-3] for row in rows)
                self._file = TensorBoardFile(Path(self._settings.tensorboard) / FOLDER, first)
            self._file.write(last, dict(_values(rows)))
            self._step, self._after_s = last, end_ns / 1e9


def _values(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[str, float]]:
    """Yield tags and seconds: own time of actions, exposed time of communication and of the host, time of a step."""
    for axis, name, least, middle, most, *_ in rows:
        kind = "" if axis in (COMPUTE, HOST_AXIS, STEP_AXIS) else "exposed "
        tag = axis if axis == name else f"{kind}{axis} {name}"
        yield from ((f"{tag}/min", least), (f"{tag}/median", middle), (f"{tag}/max", most))
