"""What ranks of worlds have in common: the server that forks them imports it once, in place of each of them."""

from __future__ import annotations

import gc
from importlib import import_module
from pkgutil import walk_packages

gc.disable()  # imports leave next to no garbage
for _name in (
    "encodings.idna",
    "hypothesis",
    "numpy.random",
    "pytest",
    "safetensors.torch",
    "torch.distributed.checkpoint",
    "torch.utils.checkpoint",
    "megascale.operate.node.stored_copies",
    "megascale.ops.flex",
    "tests.marks",
    "tests.recorded_events",
    "tests.runs",
    "tests.thread_world",
    "tests.worlds",
):
    import_module(_name)

for _name in ("checkpoint", "comm", "convert", "model", "optim", "parallel", "schedule", "train"):
    for _module in walk_packages(import_module(f"megascale.{_name}").__path__, f"megascale.{_name}."):
        import_module(_module.name)

gc.enable()
gc.collect()
gc.freeze()  # else a rank's first collection writes to the pages of all these objects, and so copies them
