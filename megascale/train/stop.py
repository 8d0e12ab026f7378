"""A request to stop: SIGTERM, Ctrl-C or the end of the terminal finishes the step and saves; a second one ends the
process at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from megascale.core.errors import Exit
from megascale.core.process import stop_signals


class Stop:
    """Whether this rank was asked to stop. Ranks agree in the step's own reduction, so one that was asked is enough."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> Stop:
        """Take over the signals that ask to stop."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number != signal.SIGHUP:  # shell and kernel may each send one
            os._exit(Exit.STOPPED)
        self.asked = True
