"""Hardware profile of this machine's processor (`megascale bench profile`), for `megascale plan --hardware this`.

GEMMs, attention and links are timed alone, with one rank per core, all at the same time; then steps of small models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megascale.bench import cpu_core, links, profile_steps
from megascale.bench.cost_fit import Measurement
from megascale.bench.profile_fit import MeasuredProfile, PrecisionMeasurements, fit_profile
from megascale.catalog.precisions import PRECISIONS
from megascale.comm.mesh import Mesh, open_mesh
from megascale.device import Device
from megascale.layout.topology import Topology

Log = Callable[[str], object]


def measure_profile(
    device: Device,
    rank: int,
    world: int,
    log: Log,
    formats: Sequence[str] = profile_steps.FORMATS,
    oversubscribed: profile_steps.OversubscribedSteps | None = None,
) -> MeasuredProfile | None:
    """Measure with all ranks of a job, one per core. Rank 0 returns the profile, with oversubscription if
    `oversubscribed` is given.

    Raises: MegascaleError if a measurement is implausible
    """
    torch.set_num_threads(1)
    mesh = open_mesh(Topology(dp=world), rank, tied=False)
    log("links")
    timed = links.measure_links(device, rank, world, links.SIZES)
    measured = {name: _samples(name, mesh, device, log) for name in formats}
    return fit_profile(device.total_memory(), timed, measured, oversubscribed) if rank == 0 else None


def _samples(name: str, mesh: Mesh, device: Device, log: Log) -> PrecisionMeasurements:
    dtype = getattr(torch, PRECISIONS[name].facts["compute_dtype"])
    log(f"GEMMs and attention in {name}")
    gemms = _measure_on_all_ranks(mesh, lambda: cpu_core.measure_gemms(dtype))
    attention_forward = _measure_on_all_ranks(mesh, lambda: cpu_core.measure_attention(dtype, backward=False))
    attention_backward = _measure_on_all_ranks(mesh, lambda: cpu_core.measure_attention(dtype, backward=True))
    log(f"steps in {name}")
    steps = [
        _measure_on_all_ranks(mesh, partial(profile_steps.time_case, case, name, device))[0]
        for case in profile_steps.CASES
    ]
    return PrecisionMeasurements(gemms, attention_forward, attention_backward, steps)


def _measure_on_all_ranks(mesh: Mesh, work: Callable[[], list[Measurement]]) -> list[Measurement]:
    """Measure on all ranks at the same time, and gather the timings."""
    mesh.world.control.barrier("measurement")
    results = [[sample.amounts, sample.seconds] for sample in work()]
    ranks = zip(*mesh.world.control.all_gather(results, "measurements"), strict=True)
    return [Measurement(tuple(same[0][0]), tuple(s for _, seconds in same for s in seconds)) for same in ranks]
