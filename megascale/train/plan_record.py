"""The prediction of `megascale plan` for this run, saved at its start as RUN/plan.json for `megascale diagnose --mfu`.

Rank 0 starts the command as a process of low priority, which takes a second of a core beside the first steps, and never
waits for it. Without a profile of the hardware the file has the reason instead. To compare with another profile, write
the file anew: `megascale plan RUN/config.toml --gpus N --hardware NAME --json > RUN/plan.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.catalog.accelerators import find_accelerator
from megascale.core.files import is_file, write_text
from megascale.core.process import module_command
from megascale.train.run import Hook

if TYPE_CHECKING:
    from megascale.device import Device
    from megascale.train.run import Run

PLAN_FILE = "plan.json"  # name of the file in the run's folder

LOWEST_PRIORITY = 19


class PlanRecord(Hook):
    """Plans the run beside its first steps, on rank 0."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run_begins(self, run: Run) -> None:
        if run.mesh.rank:
            return
        file = run.config.folder / PLAN_FILE
        profile, reason = own_profile(run.device)
        if not profile:
            _write(file, {"reason": reason})
            return
        command = module_command("megascale", "plan", str(run.config.folder / "config.toml"), "--json")
        command += ["--gpus", str(run.config.world_size), "--hardware", profile]
        with contextlib.suppress(OSError, RuntimeError):  # a run without a plan trains as well
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)
            threading.Thread(target=_finish, args=(self._process, file), name="plan", daemon=True).start()

    def run_ends(self, run: Run) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def run_fails(self, run: Run, error: BaseException) -> None:
        self.run_ends(run)


def own_profile(device: Device) -> tuple[str, str]:
    """Return the name of this machine's hardware profile; "" and the reason without one."""
    from megascale.config.profile_files import THIS_MACHINE, path_of

    found = THIS_MACHINE if device.is_cpu else profile_of(device.name, device.total_memory())
    if found and not (device.is_cpu and not is_file(path_of("hardware", THIS_MACHINE), optional=True)):
        return found, ""
    hint = "`megascale bench profile` measures it" if device.is_cpu else "configs/hardware has none"
    return "", f"no profile of {device.name}: {hint}"


def profile_of(device_name: str, memory: int) -> str | None:
    """Return the hardware profile of a GPU: the accelerator's with the nearest memory, and the shortest name of several
    networks; None if there is none.
    """
    from megascale.config.profile_files import profile_names
    from megascale.plan.simulate.profiles import hardware

    accelerator = find_accelerator(device_name)
    found = []
    for name in profile_names("hardware") if accelerator else ():
        device = hardware(name).device
        if accelerator is not None and device.accelerator == accelerator.name:
            found.append((abs(device.memory - memory) // 2**30, len(name), name))
    return min(found)[2] if found else None


def _finish(process: subprocess.Popen[str], file: Path) -> None:
    """Write the plan, or why there is none."""
    output, errors = process.communicate()
    try:
        plan = json.loads(output)
    except ValueError:
        plan = {"reason": (errors.strip().splitlines() or [f"the plan ended with status {process.returncode}"])[0]}
    _write(file, plan)


def _write(file: Path, plan: object) -> None:
    with contextlib.suppress(OSError):
        write_text(file, json.dumps(plan) + "\n")
