"""MegaScale's Table 3: its baseline and what each of its techniques adds, as stacks between the two that are fitted."""

from __future__ import annotations

from megascale.simulate.profiles import Stack

STEPS = (
    "Megatron-LM",
    "parallel transformer block",
    "sliding window attention",
    "tensor parallel overlap",
    "pipeline overlap",
    "data parallel overlap",
    "efficient operators",
    "data pipeline and others",
    "LAMB, three times the batch",
)
"""The rows of the table. The configuration says what the second, the third and the last change."""


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
