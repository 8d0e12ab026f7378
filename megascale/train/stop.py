"""Stop requests: SIGTERM, Ctrl-C or a terminal's hang-up ends training after the step, with a save.

A second signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from megascale.core.errors import Exit
from megascale.core.process import stop_signals


class StopRequest:
    """The stop flag of this rank. The step's all-reduce of totals spreads the flag to all ranks."""

    def __init__(self) -> None:
        self.requested = False

    def install_handlers(self) -> StopRequest:
        """Install handlers for the stop signals."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number != signal.SIGHUP:  # shell and kernel may both send SIGHUP
            os._exit(Exit.STOPPED)
        self.requested = True
