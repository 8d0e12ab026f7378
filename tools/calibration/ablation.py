"""MegaScale's Table 3 (ablation): stacks between the fitted stacks of the baseline and of MegaScale.

Rows: 1 Megatron-LM, 2 parallel transformer block, 3 sliding window attention, 4 to 6 overlap of tensor, pipeline and
data parallelism, 7 efficient operators, 8 data pipeline and more, 9 LAMB with three times the batch. Rows 2, 3 and 9
differ in the configuration, not in the stack.
"""

from __future__ import annotations

from megascale.plan.simulate.profiles import Stack

COSTS = {"slowdown": 7, "step_s": 8}
"""First row with MegaScale's value, by efficiency."""


def stack(row: int, baseline: Stack, megascale: Stack) -> Stack:
    """Return the stack of a row (from 1): the baseline with MegaScale's techniques up to the row."""
    overlaps = {
        axis: getattr(megascale.overlaps, axis) for axis, first in (("tp", 4), ("pp", 5), ("dp", 6)) if row >= first
    }
    costs = {name: getattr(megascale.attained, name) for name, first in COSTS.items() if row >= first}
    return baseline.model_copy(
        update={
            "attention": (megascale if row >= 7 else baseline).attention,
            "overlaps": baseline.overlaps.model_copy(update=overlaps),
            "attained": baseline.attained.model_copy(update=costs),
        }
    )
