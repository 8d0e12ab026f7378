"""Loads of experts by layer, from an event store: `recent_loads`, and the finding of `imbalance`.

A layer is unbalanced if in each of the newest logged steps the same expert takes more than MOST_LOAD times the mean.
A fullest expert that changes from step to step is chance, which a larger batch evens out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megascale.operate.diagnose.slow.finding import Finding, SlowCulprit
from megascale.operate.diagnose.slow.step_cube import Floats, Integers
from megascale.operate.store.query import fetch

if TYPE_CHECKING:
    import duckdb

MOST_LOAD, LEAST_LOAD = 2.0, 0.1  # loads, relative to the mean, beyond which an expert is overloaded, or idle
LASTING = 3  # fewest logged steps in which an expert is overloaded
RECENT = 20  # most logged steps that are read
MOST_LAYERS = 8  # most layers that a finding describes
LOAD_HEAD = "layer", "fullest expert", "its load", "least load", f"experts below {LEAST_LOAD:g}"


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of experts [steps, layers, experts] in the newest logged steps, relative to the mean of their layer; NaN
    where the store has none. `steps`, `layers`: their numbers, ascending.
    """

    steps: Integers
    layers: Integers
    loads: Floats

    @property
    def idle(self) -> Integers:
        """Number of idle experts by layer, in the mean of the steps."""
        return np.asarray((np.nanmean(self.loads, 0) < LEAST_LOAD).sum(1))

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A row of LOAD_HEAD for each layer, of means over the steps."""
        return [
            (str(layer), str(int(np.nanargmax(mine))), f"{np.nanmax(mine):.2f}", f"{np.nanmin(mine):.2f}", str(idle))
            for layer, mine, idle in zip(self.layers, np.nanmean(self.loads, 0), self.idle, strict=True)
        ]


def recent_loads(store: duckdb.DuckDBPyConnection, most: int = RECENT) -> ExpertLoads:
    """Return the loads of the newest `most` logged steps of the last attempt; empty without experts."""
    rows = fetch(store, f"""
        SELECT step, layer, expert, load FROM expert_loads
        WHERE attempt = (SELECT max(attempt) FROM expert_loads)
        QUALIFY dense_rank() OVER (ORDER BY step DESC) <= {most}""")  # fmt: skip
    steps, step = np.unique(rows["step"], return_inverse=True)
    layers, layer = np.unique(rows["layer"], return_inverse=True)
    loads = np.full((len(steps), len(layers), int(rows["expert"].max(initial=-1)) + 1), np.nan)
    loads[step, layer, rows["expert"]] = rows["load"]
    return ExpertLoads(steps, layers, loads)


def imbalance(found: ExpertLoads) -> Iterator[Finding]:
    """Yield a finding about the fullest expert, if it stays overloaded. Its evidence has all unbalanced layers."""
    if len(found.steps) < LASTING:
        return
    newest = found.loads[-LASTING:]
    mean, idle = np.nanmean(newest, 0), found.idle
    over = np.where(newest.min(0) > MOST_LOAD, mean, 0.0)  # 0 also where a load is unknown in one of the steps
    expert, load = over.argmax(1), over.max(1)
    ranked = [at for at in np.argsort(-load, kind="stable").tolist() if load[at]]
    lines = [
        f"layer {found.layers[at]}: expert {expert[at]} has {load[at]:.3g} times the mean load; "
        f"{idle[at]} of {found.loads.shape[2]} experts have less than {LEAST_LOAD:g} of it"
        for at in ranked[:MOST_LAYERS]
    ]
    if len(ranked) > MOST_LAYERS:
        lines.append(f"and {len(ranked) - MOST_LAYERS} more layers with an expert above {MOST_LOAD:g}")
    for at in ranked[:1]:
        balanced = np.flatnonzero(~(found.loads[:, at, expert[at]] > MOST_LOAD))
        since = int(found.steps[balanced[-1] + 1 if len(balanced) else 0])
        who = SlowCulprit("expert", layer=int(found.layers[at]), expert=int(expert[at]))
        yield Finding("experts", who, since, None, 0.0, 0.0, tuple(lines))
