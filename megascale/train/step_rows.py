"""The rows of steps in the event store: times, loss, and tags for what a step contains besides training."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from megascale.plan.account.flops import model_flops
from megascale.record.events import PAUSE
from megascale.record.layout import TAGS, Phase
from megascale.record.log import StepRow
from megascale.train.batch_totals import per_token, take_scores

if TYPE_CHECKING:
    from megascale.train.run import Run, StepResult

TAG_SHARES = {Phase.GC: 0.02, Phase.EVALUATION: 0.0, Phase.CHECKPOINT: 0.02, Phase.DATA: 0.25}
"""Shares of a step's training time above which an activity of the host is a tag of the step."""


class StepRows:
    """A context manager for training that writes a row for each step into the rank's log, when the next step begins or
    training ends. Also records as activities of the host Python's garbage collections, automatic ones
    too, and pauses of the process.
    """

    def __init__(self, run: Run) -> None:
        config = run.config
        self._run = run
        self._recorder = run.mesh.recorder
        self._tokens = config.batch.total * config.model.seq_length
        self._flops = self._tokens * model_flops(config).full
        self._model = config.model
        self._first = run.progress.step + 1
        self._start = self._gc_start = 0.0
        self._trained: tuple[float, float, StepResult] | None = None  # start and end of training, before what follows
        self._collections: list[tuple[float, float]] = []  # a collection may interrupt a write into the log

    def __enter__(self) -> StepRows:
        gc.callbacks.append(self._take_collection)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._take_collection)
        if kind is None:
            self._recorder.resolve_marks()
        self._write()

    def begin(self, step: int) -> None:
        """Note that a step's batch is asked for."""
        self._write()
        self._recorder.window = step
        self._start = time.perf_counter()

    def end(self, result: StepResult) -> None:
        """Note that a step has been trained."""
        self._trained = self._start, time.perf_counter(), result

    def _take_collection(self, phase: str, info: Mapping[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._gc_start = now
        else:
            self._collections.append((self._gc_start, now))
            self._recorder.interrupt_action(self._gc_start, now)

    def _write(self) -> None:
        """Write the row of the last trained step, which ends now."""
        collections, self._collections = self._collections, []
        for start, end in collections:
            self._recorder.record_activity(Phase.GC, start, end)
        while self._recorder.log.pauses:
            self._recorder.record_activity(PAUSE, *self._recorder.log.pauses.popleft(), exposed=False)
        activities, trained, self._trained = self._recorder.take_activities(), self._trained, None
        if trained is None:
            return
        step, (start, end, result) = self._recorder.window, trained
        train, samples, scores = end - start, result.totals.get("samples"), take_scores(self._model, result.totals)
        # fewer tokens while the batch grows; FLOPs by the documents that the step has attended to
        tokens = self._tokens if samples is None else int(samples) * self._model.seq_length
        flops = self._flops * tokens / self._tokens
        if scores is not None:
            flops = tokens * model_flops(self._run.config, per_token([scores], tokens)).full
        row = StepRow(
            step=step,
            start=start,
            end=time.perf_counter(),
            train=train,
            tags=self._tags(step, {name: seconds / train for name, seconds in activities.items()}),
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens=tokens,
            flops=flops,
            peak_memory_bytes=self._run.device.peak_memory(),
        )
        self._recorder.log.write_step(row)

    def _tags(self, step: int, shares: Mapping[str, float]) -> int:
        """Return the bits of a step's tags."""
        found = {str(phase) for phase, least in TAG_SHARES.items() if shares.get(phase, 0.0) > least}
        if step == self._first:
            found |= {"first step"} | ({"restart"} if step > 1 else set())
        profiled = self._run.config.observe.profile_step
        if profiled and step in (profiled, profiled + 1):  # the next step waits for the ranks that write the profile
            found.add("profile")
        return sum(1 << TAGS.index(tag) for tag in found)
