"""Triton's kernels in steps of a run on a fake GPU: launched as often as counted, and no step waits for them."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import pytest

from lab.launches import LaunchCounter, TritonKernel, noted_kernels
from megascale.catalog.backends import BACKENDS
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from tests.parallel.test_fp8_launches import LAUNCHES, OPERANDS
from tests.parallel.test_fp8_linear import WIDE, configured
from tests.worlds import run_world

KERNELS = {
    "cast_transpose": ("_fp8_amax", "_fp8_cast", "_fp8_cast_rows"),
    "scaled_wgrad": ("_fp8_gemm",),
    "triton_adamw": ("_adamw",),
    "triton_cross_entropy": ("_statistics", "_gradient"),
    "triton_swiglu": ("_swiglu",),
}
TRITON = ("linear", "optimizer", "cross_entropy", "activation")
COUNTING = ("_fp8_cast", "_fp8_cast_rows", "_swiglu")
LINEARS, MICRO_BATCHES = 4, 2
Step = tuple[dict[str, int], bool]
"""Launches by kernel, and whether a cast counts what saturates and underflows."""


def steps(_: Rank, configs: list[RunConfig]) -> dict[str, list[Step]]:
    """The first three steps of each recipe. Casts are noted with the bytes of their counts."""
    from megascale.train.step import train_step
    from tests.fakegpu import build_fake, open_device, watched

    open_device()
    counter, found = LaunchCounter(), dict[str, list[Step]]()
    for config in configs:
        with watched(), ExitStack() as stack:
            for module, names in KERNELS.items():
                kernels = [TritonKernel(name, ("sums",) if name in COUNTING else (), ()) for name in names]
                stack.enter_context(noted_kernels(counter, import_module(f"megascale.ops.{module}"), kernels))
            run = build_fake(config, 0)
            for _ in range(3):
                train_step(run, run.train_loader.batch(run.progress.samples))
                launches = counter.take()
                step = dict(Counter(launch.name for launch in launches)), any(launch.read for launch in launches)
                found.setdefault(config.fp8.recipe, []).append(step)
    return found


def expected(recipe: str) -> dict[str, int]:
    """Launches of a later step. AdamW has a segment with weight decay and one without; SwiGLU casts its result and its
    gradient, or finds their amaxes.
    """
    count = Counter(_statistics=MICRO_BATCHES, _gradient=MICRO_BATCHES, _fp8_gemm=LINEARS * MICRO_BATCHES, _adamw=2)
    count["_swiglu"] = 2 * MICRO_BATCHES
    for operand, launches in zip(OPERANDS, LAUNCHES[recipe], strict=True):
        times = LINEARS * (1 if operand == "weight" else MICRO_BATCHES)
        count.update({name: times * launches.count(name) for name in launches if name.startswith("_fp8")})
    for known in (
        ("_fp8_amax",) if recipe == "tensorwise" else ("_fp8_cast",) if recipe in ("delayed", "static") else ()
    ):
        count[known] -= 2 * MICRO_BATCHES
    return dict(count)


def test_steps_launch_the_counted_kernels_and_count_casts_where_they_are_logged(tmp_path: Path) -> None:
    """The first and the third step are logged. A wait for the device raises."""
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")
    backends = {f"backends__{name}": "triton" if name in TRITON else "torch" for name in BACKENDS}
    model = WIDE | {"num_layers": 1, "activation": "swiglu"}
    more = {"fp8__first_layers_bf16": 0, "fp8__last_layers_bf16": 0, "train__log_every": 3} | backends
    configs = [configured(tmp_path, recipe, model, **more) for recipe in LAUNCHES]
    (found,) = run_world(1, steps, configs)
    for recipe, (first, *later) in found.items():
        assert first[1], recipe
        assert later == [(expected(recipe), False), (expected(recipe), True)], recipe
