"""Stop signals close open files."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.core.process import exit_on_stop_signals
from tests.jobs import heed_signals

WRITE = """
import sys, time
from pathlib import Path
from megascale.core.files import atomic_file
from megascale.core.process import exit_on_stop_signals
with exit_on_stop_signals(), atomic_file(Path(sys.argv[1])) as file:
    print("open", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_open_files_are_closed(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE, str(tmp_path / "file")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with pytest.raises(KeyError), exit_on_stop_signals():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
        raise KeyError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before
