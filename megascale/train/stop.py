"""Stop requests: SIGTERM, Ctrl-C or a terminal's hang-up ends training after the step, with a save.

A rank that megascale's launcher or an agent has started heeds its parent's STOP_ORDER. A signal of its own may be one
delivery of many, and the parent may have got it too: the rank trains on and waits for the order. Without one the signal
is meant for this rank alone. Under an agent, which starts ranks again, the signal then ends the rank; under the
launcher the job stops as the rank asks. Under torchrun and srun, and without a launcher, every signal is a request to
stop.

Outside of training, as in the waits for other ranks at the start, the first request ends the process at once; in
training the second does. A thread hears the signals: Python calls a handler in the main thread only between
instructions, and the main thread may wait in C++ for minutes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from megascale.core.errors import Exit
from megascale.core.process import ORDER_WAIT_S, STOP_ORDER, StopRequests, end_by_signal, stop_signals
from megascale.core.rank import STORE_VARIABLE


class StopRequest:
    """The stop flag of this rank. The step's all-reduce of totals spreads the flag to all ranks.

    `unordered`: the signal to this rank alone that has set the flag, and no order of its parent so far; 0 for none.
    """

    def __init__(self) -> None:
        self.requested = False
        self.unordered = 0
        self._deferred = False
        self._when = "before the first step"
        self._on_stop: Callable[[str, Exit], object] = _print_stop

    def install_handlers(self, on_stop: Callable[[str, Exit], object] | None = None) -> StopRequest:
        """Hear the stop signals from now on. `on_stop`: called with a message and the exit status before a request ends
        the process outside of training.
        """
        self._on_stop = on_stop or self._on_stop
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        listen = self._listen_to_parent if STORE_VARIABLE in os.environ else self._listen
        threading.Thread(target=listen, args=(reader,), name="stop signals", daemon=True).start()
        for number in (*stop_signals(), STOP_ORDER):
            signal.signal(number, lambda number, frame: None)  # the number goes into the pipe
        return self

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """In the block, a first request only sets the flag: there is a step to finish and a state to save. After an
        error in the block too: the rank is ending, and has the error to report.
        """
        self._deferred = True
        yield
        self._deferred, self._when = False, "after the last step"

    def _listen(self, pipe: int) -> None:
        requests = StopRequests()
        while True:
            for number in os.read(pipe, 1 << 10):
                if number in stop_signals() and requests.add(number, time.monotonic()):
                    status = Exit.INTERRUPTED if number == signal.SIGINT else Exit.STOPPED
                    self._heed(f" by {signal.Signals(number).name}", status)

    def _listen_to_parent(self, pipe: int) -> None:
        ready = select.poll()
        ready.register(pipe, select.POLLIN)
        own, until = 0, 0.0
        while True:
            if not ready.poll(1000 * max(0.0, until - time.monotonic()) if own else None):
                self._heed_alone(signal.Signals(own))
                own = 0
                continue
            for number in os.read(pipe, 1 << 10):
                if number == STOP_ORDER:
                    own = 0
                    self._heed("", Exit.STOPPED)
                elif number in stop_signals() and not own and not self.requested:
                    own, until = number, time.monotonic() + ORDER_WAIT_S

    def _heed(self, by: str, status: Exit) -> None:
        if not self._deferred:
            self._on_stop(f"stopped{by} {self._when}", status)
            os._exit(status)
        if self.requested and not self.unordered:
            os._exit(Exit.STOPPED)
        self.requested, self.unordered = True, 0

    def _heed_alone(self, number: signal.Signals) -> None:
        """Heed a signal that the parent of this rank did not get."""
        from megascale.record.log_files import ATTEMPT_VARIABLE

        stops_job = self._deferred and ATTEMPT_VARIABLE not in os.environ
        then = "the job saves and stops" if stops_job else "this rank ends"
        _print_stop(f"received {number.name}, which nobody of this job sent: {then}", Exit.STOPPED)
        if not stops_job:
            end_by_signal(number)
        self.requested, self.unordered = True, number


def _print_stop(message: str, status: Exit) -> None:
    with contextlib.suppress(OSError):
        print(f"megascale: {message}", file=sys.stderr, flush=True)
