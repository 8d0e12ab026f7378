"""`megascale watch` in a real terminal, over a pipe, and beside a job."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.core.errors import Exit
from tests.jobs import Job, job_config
from tests.operate.show.folders import RUNS, live_rank, make_run, write_live
from tests.runs import GPT

SECONDS = 60
RUNNING = [RUNS] * 4
AHEAD_S = -3600.0
"""Age of a live file that stays fresh for an hour."""

UNSIZED = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
"""The environment without the terminal's size, which readline in a parent process may have set."""


class Terminal:
    """`megascale watch RUN` in a pseudo-terminal. `text`: what it has written so far."""

    def __init__(self, folder: Path, rows: int = 24, columns: int = 80, **env: str) -> None:
        self._terminal, theirs = pty.openpty()
        self.resize(rows, columns)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megascale", "watch", str(folder)],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**UNSIZED, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **env},
        )  # fmt: skip
        os.close(theirs)
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, pattern: str) -> None:
        """Read until the output matches."""
        deadline = time.monotonic() + SECONDS
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, self.text
            assert self._read(), self.text

    def end(self) -> int:
        """Read to the end, and return the exit status."""
        while self._read():
            pass
        os.close(self._terminal)
        return self.process.wait(SECONDS)

    def _read(self) -> bool:
        if not select.select([self._terminal], [], [], SECONDS)[0]:
            return False
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


def watch(*arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "megascale", "watch", *arguments]
    return subprocess.run(command, capture_output=True, env={**os.environ, **env}, timeout=SECONDS, check=False)


def test_frames_follow_the_run_until_it_ends(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, RUNNING, age_s=AHEAD_S)
    terminal = Terminal(folder)
    terminal.wait_for("all 4 ranks make progress")
    assert "\x1b[?1049h" in terminal.text, "on the alternate screen"
    assert "\x1b[30;48;" in terminal.text, "in colours"
    assert "▁" in terminal.text
    write_live(folder, [*RUNNING[1:], live_rank("step", 5, 30, 30, "T")], age_s=AHEAD_S)
    terminal.wait_for("stopped: rank 3")
    write_live(folder, [live_rank("done", 10)] * 4, status=0)
    assert terminal.end() == Exit.OK
    assert terminal.text.rindex("\x1b[?1049l") < terminal.text.rindex("= done 4"), "the last frame stays"


def test_ctrl_c_ends_it_and_gives_the_terminal_back(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, RUNNING, age_s=AHEAD_S)
    terminal = Terminal(folder, LC_ALL="C", NO_COLOR="1")
    terminal.wait_for("all 4 ranks make progress")
    assert "48;2;" not in terminal.text
    assert terminal.text.isascii()
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == Exit.OK
    assert terminal.text.rstrip().endswith("\x1b[?25h\x1b[?1049l"), "cursor and screen are as before"
    assert "Traceback" not in terminal.text


def test_it_fits_a_terminal_that_is_resized(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, RUNNING, age_s=AHEAD_S)
    terminal = Terminal(folder, rows=24, columns=80)
    terminal.wait_for("a cell is a rank")
    terminal.text = ""
    terminal.resize(30, 120)
    terminal.wait_for(r"ranks\S* {90,}a cell is a rank")
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.end()


@pytest.mark.parametrize("arguments", [[], ["--once"]])
def test_one_frame_on_a_pipe(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("LC_ALL", "POSIX")
    folder = make_run(tmp_path)
    write_live(folder, RUNNING, age_s=AHEAD_S)
    assert main(["watch", str(folder), *arguments]) == Exit.OK
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    assert "all 4 ranks make progress" in out


def test_a_folder_that_is_no_run_s_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["watch", str(tmp_path)]) == Exit.CONFIG
    message = f"{tmp_path}: not a run's folder: it has no config.toml  -> "
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.slow
def test_a_real_job_is_followed_from_its_start_to_its_end(tmp_path: Path) -> None:
    """The launcher writes the live file; a stopped rank is seen, and the end."""
    job = Job(job_config(tmp_path, GPT, parallel__tp=2, train__steps=10_000, train__precision="fp32"))
    job.wait_for_step(2)
    victim = job.ranks()[1]
    os.kill(victim, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + SECONDS
        while b"stopped: rank 1" not in (out := watch(str(job.folder), "--once").stdout):
            assert time.monotonic() < deadline, out
    finally:
        os.kill(victim, signal.SIGCONT)
    job.signal(signal.SIGTERM)
    assert job.end()[0] == Exit.STOPPED
    out = watch(str(job.folder)).stdout.decode()
    assert re.search(r"test  stopped +step \d+ of 10,000", out)
    assert "= done 2" in out
