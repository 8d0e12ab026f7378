"""Stop requests: SIGTERM, Ctrl-C or a terminal's hang-up ends training after the step, with a save.

Outside of training, as in the waits for other ranks at the start, the first signal ends the process at once; in
training the second does. A thread hears the signals: Python calls a handler in the main thread only between
instructions, and the main thread may wait in C++ for minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from megascale.core.errors import Exit
from megascale.core.process import stop_signals


class StopRequest:
    """The stop flag of this rank. The step's all-reduce of totals spreads the flag to all ranks."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._when = "before the first step"
        self._on_stop: Callable[[str, Exit], object] = _print_stop

    def install_handlers(self, on_stop: Callable[[str, Exit], object] | None = None) -> StopRequest:
        """Hear the stop signals from now on. `on_stop`: called with a message and the exit status before a signal ends
        the process outside of training.
        """
        self._on_stop = on_stop or self._on_stop
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="stop signals", daemon=True).start()
        for number in stop_signals():
            signal.signal(number, lambda number, frame: None)  # the number goes into the pipe
        return self

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """In the block, a first signal only sets the flag: there is a step to finish and a state to save. After an
        error in the block too: the rank is ending, and has the error to report.
        """
        self._deferred = True
        yield
        self._deferred, self._when = False, "after the last step"

    def _listen(self, pipe: int) -> None:
        stops = set(stop_signals())
        while True:
            for number in os.read(pipe, 1 << 10):
                if number in stops:
                    self._heed(signal.Signals(number))

    def _heed(self, number: signal.Signals) -> None:
        if not self._deferred:
            status = Exit.INTERRUPTED if number == signal.SIGINT else Exit.STOPPED
            self._on_stop(f"stopped by {number.name} {self._when}", status)
            os._exit(status)
        if self.requested and number != signal.SIGHUP:  # shell and kernel may both send SIGHUP
            os._exit(Exit.STOPPED)
        self.requested = True


def _print_stop(message: str, status: Exit) -> None:
    with contextlib.suppress(OSError):
        print(f"megascale: {message}", file=sys.stderr, flush=True)
