"""The moments of a rank at which injected faults strike (`fault.inject`), and the faults that need the run's objects.

Without `fault.inject` nothing is attached. A fault of the phase `write` strikes the process that writes checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.comm.group import CommunicationFault, Group
from megascale.comm.work import LateWork, TransportWork
from megascale.config.injection import Fault, parse_injection
from megascale.core.errors import ConfigError, Problem
from megascale.core.rank import Rank
from megascale.operate.node.inject import Injector, describe, stop_process, strike
from megascale.record.label import Label, LabelLike
from megascale.record.recorder import EventRecord
from megascale.schedule.ir import COMPUTE_KINDS, Kind

if TYPE_CHECKING:
    from megascale.train.run import Run

ACTION_PHASES = {kind.value: COMPUTE_KINDS[kind].phase for kind in (Kind.F, Kind.B, Kind.I)} | {"update": "optimizer"}
"""Phases by the names of a step's actions."""

_INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


class FaultInjection:
    """Asks this rank's `Injector` at every moment, and lets faults strike."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._run: Run | None = None
        self._file_limits: dict[int, tuple[int, int]] = {}

    def reach(self, phase: str, step: int = 0) -> None:
        """Let a fault of this moment strike."""
        if (fault := self._injector.strikes(phase, step)) is None:
            return
        if fault.kind in ("nan", "flip_weight", "flip_gradient"):
            self._spoil(fault)
        elif phase == "write" and fault.kind in ("kill", "stop", "hang", "hold_gil", "slow_storage", "full_disk"):
            self._strike_writer(fault)
        else:
            strike(fault, describe(fault))

    def find(self, phase: str) -> Fault | None:
        """Return the fault of this phase, which the caller lets strike, if a step is under way."""
        assert self._run is not None
        return self._injector.strikes(phase, step) if (step := self._run.mesh.recorder.step) else None

    def attach(self, run: Run) -> None:
        """Attach to the run's groups, actions, loaders and saver."""
        self._run = run
        for group in run.mesh.groups:
            group.fault_hook = _GroupMoments(self, group)
        run.mesh.recorder.on_action = self._before_action
        planned = [kind for kind in ("slow_compute", "delay_message") if self._injector.plans(kind)]
        if planned and not run.mesh.recorder.timer.synchronous:  # a pause of the host would slow nothing
            message, hint = f"{planned[0]} needs processors, not {run.device.name}", "slow works on every device"
            raise ConfigError([Problem("configuration", "fault.inject", message, hint)])
        if "slow_compute" in planned:
            run.mesh.recorder.after_action = self._lengthen
        run.train_loader.fault_hook = lambda: self.reach("data", run.progress.step + 1)
        if run.checkpoints.saver is not None:
            run.checkpoints.saver.fault_hook = self._reach_in_save

    def _before_action(self, name: str) -> None:
        assert self._run is not None
        if name == Kind.F and not self._run.mesh.recorder.step:
            self.reach("evaluation", self._run.progress.step)
        elif name in ACTION_PHASES and (step := self._run.mesh.recorder.step):
            self.reach(ACTION_PHASES[name], step)

    def _lengthen(self, action: EventRecord) -> None:
        """Let an action take longer, by a share of its own time: as much of it as it has computed."""
        assert self._run is not None
        if (step := self._run.mesh.recorder.step) and (fault := self._injector.strikes("", step)):
            own = time.perf_counter() - action.issue
            for start, end in action.waits:
                own -= end - start
            time.sleep(max(0.0, own * (fault.factor - 1)))

    def _reach_in_save(self, moment: str) -> None:
        assert self._run is not None
        if moment == "commit":  # the writer has answered
            for pid, limits in self._file_limits.items():
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
            self._file_limits.clear()
        self.reach(moment, self._run.progress.step)

    def _spoil(self, fault: Fault) -> None:
        """Spoil a value of the first bucket: on this rank's own shard, which no all-gather overwrites."""
        assert self._run is not None
        bucket = next(iter(self._run.buffers.trained), self._run.buffers.buckets[0])
        if fault.kind == "flip_gradient":
            flip_bit(bucket.grad, fault.bit)
            return
        self._run.buffers.finish_param_gather()  # the all-gather in flight would overwrite it
        if fault.kind == "nan":
            bucket.weights.fill_(math.nan)
        else:
            flip_bit(bucket.shard_weights, fault.bit)

    def _strike_writer(self, fault: Fault) -> None:
        assert self._run is not None and self._run.checkpoints.saver is not None
        pid = self._run.checkpoints.saver.writer_pid
        if fault.kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif fault.kind == "full_disk":
            limits = self._file_limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        else:
            stop_process(pid, fault.for_s)


def flip_bit(values: Tensor, bit: int) -> None:
    """Flip a bit of the middle element of a flat tensor; of the bits that its dtype has, counted round."""
    size = 8 * values.element_size()
    whole = values.view(_INTEGERS[size])
    bit %= size
    whole[whole.numel() // 2] ^= (1 << bit) - (1 << size if bit == size - 1 else 0)  # the sign bit is negative


class _GroupMoments:
    """The `fault_hook` of a group."""

    def __init__(self, injection: FaultInjection, group: Group) -> None:
        self._injection = injection
        self._axis = group.axis
        self._late = _LateSends()

    def __call__(self, operation: str, label: LabelLike) -> CommunicationFault | None:
        if operation == "wait" or not (phase := self._phase(operation, label)):
            return None
        if (fault := self._injection.find(phase)) is None:
            return None
        if fault.kind in ("skip_collective", "lose_message"):
            return CommunicationFault(left_out=fault.kind == "skip_collective", lost=fault.kind == "lose_message")
        if fault.kind == "delay_message":
            return CommunicationFault(send_later=partial(self._late.send, fault.delay_s))
        return CommunicationFault(strike=partial(strike, fault, describe(fault)))

    def _phase(self, operation: str, label: LabelLike) -> str:
        if operation in ("send", "receive") or self._axis in ("tp", "ep"):
            return operation if self._axis == "pp" else self._axis
        if Label.from_part(label).text() == "totals":
            return "totals"
        if self._axis in ("dp", "edp", "tied"):
            return "param_gather" if operation == "all_gather" else "grad_reduce"
        return ""


class _LateSends:
    """Messages of a group that leave later, in their order, by a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "late messages")

    def send(self, delay_s: float, start: Callable[[], TransportWork]) -> TransportWork:
        due = time.monotonic() + delay_s

        def send_when_due() -> TransportWork:
            time.sleep(max(0.0, due - time.monotonic()))
            return start().in_background()

        return LateWork(self._thread.submit(send_when_due))


def fault_injection(inject: str, rank: Rank, folder: Path) -> FaultInjection | None:
    """Return the injection of `fault.inject` in a run's folder; None without faults."""
    injection = parse_injection(inject)
    return FaultInjection(Injector(injection, rank.rank, rank.world_size, folder)) if injection else None
