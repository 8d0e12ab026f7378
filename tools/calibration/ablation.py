"""MegaScale's Table 3: its baseline and what each of its techniques adds, as stacks between the two that are fitted.

Rows: 1 Megatron-LM, 2 parallel transformer block, 3 sliding window attention, 4 to 6 overlap of tensor, pipeline and
data parallelism, 7 efficient operators, 8 data pipeline and others, 9 LAMB with three times the batch. The
configuration of a row says what 2, 3 and 9 change.
"""

from __future__ import annotations

from megascale.simulate.profiles import Stack

COSTS = {"slowdown": 7, "step_s": 8}
"""By efficiency the first row that has MegaScale's."""


def stack(row: int, baseline: Stack, megascale: Stack) -> Stack:
    """Of a row of the table, from 1: the baseline with what MegaScale has of it by then."""
    hides = {axis: getattr(megascale.hides, axis) for axis, first in (("tp", 4), ("pp", 5), ("dp", 6)) if row >= first}
    costs = {name: getattr(megascale.attained, name) for name, first in COSTS.items() if row >= first}
    return baseline.model_copy(
        update={
            "attention": (megascale if row >= 7 else baseline).attention,
            "hides": baseline.hides.model_copy(update=hides),
            "attained": baseline.attained.model_copy(update=costs),
        }
    )
