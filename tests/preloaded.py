"""What ranks of worlds have in common: the server that forks them imports it once, in place of each of them."""

from __future__ import annotations

import gc
from importlib import import_module

for _name in (
    "hypothesis",
    "numpy.random",
    "pytest",
    "safetensors.torch",
    "torch.distributed.checkpoint",
    "torch.utils.checkpoint",
    "megascale.model.block",
    "megascale.ops.flex",
    "megascale.optim.adamw",
    "megascale.train.build",
    "megascale.train.loop",
    "megascale.train.step",
    "tests.recorded_events",
    "tests.runs",
):
    import_module(_name)

gc.collect()
gc.freeze()  # else a rank's first collection writes to the pages of all these objects, and so copies them
