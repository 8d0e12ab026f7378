"""A step under torch's profiler, `observe.profile_step`: how forward and backward divide into GEMMs, attention and the
rest, for `megascale diagnose --mfu`.

The first rank of each pipeline stage profiles, and writes RUN/kernels/stage-N.json: the `rank`, the `step`, and the
`seconds` of its kernels, or of its operators on a CPU, by purpose (`train.kernels`). All ranks wait for the profiler:
the step and the next have a tag. What a first profile imports and starts, it does before the first step.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import torch

from megascale.core.errors import CheckpointError
from megascale.core.files import write_text
from megascale.core.run_folder import check_known
from megascale.layout.topology import DATA_AXES
from megascale.record.layout import Phase
from megascale.train.run import Hook

if TYPE_CHECKING:
    from megascale.train.run import Run, StepResult

KERNEL_FOLDER = "kernels"  # name of the folder in the run's folder


class KernelShares(Hook):
    """Profiles a step, on the first rank of each pipeline stage."""

    def __init__(self) -> None:
        self._profiler: torch.profiler.profile | None = None

    def run_begins(self, run: Run) -> None:
        if not run.mesh.rank and not run.progress.step:
            for path in (run.config.folder / KERNEL_FOLDER).glob("stage-*.json"):  # of an earlier run
                path.unlink(missing_ok=True)
        if _profiles(run) and run.progress.step < run.config.observe.profile_step:
            with torch.profiler.profile():
                pass

    def step_begins(self, run: Run) -> None:
        if _profiles(run) and run.progress.step + 1 == run.config.observe.profile_step:
            with run.mesh.recorder.activity(Phase.PROFILE):
                self._profiler = torch.profiler.profile()
                self._profiler.start()

    def step_ends(self, run: Run, result: StepResult) -> None:
        if (profiler := self._profiler) is not None:
            with run.mesh.recorder.activity(Phase.PROFILE):
                self._end(run)
                _write(run, profiler)

    def run_fails(self, run: Run, error: BaseException) -> None:
        self._end(run)

    def _end(self, run: Run) -> None:
        """Stop the profiler, if there is one."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            run.device.synchronize()
            profiler.stop()


def _profiles(run: Run) -> bool:
    """Return True on the first rank of each pipeline stage."""
    coord = run.mesh.coord._asdict()
    return not any(coord[axis] for axis in (*DATA_AXES, "tp"))


def _write(run: Run, profiler: torch.profiler.profile) -> None:
    """Write the seconds of the kernels of a step that has ended."""
    from megascale.train.kernels import kernels_of, purpose_seconds

    try:
        seconds = purpose_seconds(kernels_of(profiler))
        found = {"rank": run.mesh.rank, "step": run.progress.step, "seconds": seconds}
        folder = run.config.folder / KERNEL_FOLDER
        check_known(run.config.folder)
        folder.mkdir(exist_ok=True)
        write_text(folder / f"stage-{run.mesh.coord.pp}.json", json.dumps(found) + "\n")
    except (OSError, ValueError, RuntimeError, CheckpointError) as error:
        print(f"WARNING: the profile of step {run.progress.step} is not written: {error}", file=sys.stderr)
