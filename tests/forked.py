"""`--jobs N`: tests of N files at a time, in children of the process that has imported and collected all tests.

Workers of pytest-xdist would each import and collect them again.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator
from itertools import chain, groupby, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest

from megascale.core.process import die_with_parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jobs", type=int, default=1, metavar="N", help="run the tests of N files at a time")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests in `--jobs` children; without the option leave them to pytest."""
    config = session.config
    if config.getoption("jobs") == 1 or config.getoption("collectonly") or session.testsfailed:
        return None
    files = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
    files.sort(key=len, reverse=True)
    queue, feed = os.pipe()
    os.write(feed, b"".join(number.to_bytes(2, "big") for number in range(len(files))))
    os.close(feed)
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # of all children
    children: dict[Connection, int] = {}
    try:
        for _ in range(config.getoption("jobs")):
            ours, theirs = Pipe(duplex=False)
            if not (pid := os.fork()):
                _run_in_child(session, files, queue, theirs)
            theirs.close()
            children[ours] = pid
        _report(session, list(children))
    finally:
        os.close(queue)
        for pid in children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return True


def _report(session: pytest.Session, pipes: list[Connection]) -> None:
    """Report what children send, until each has run its last test.

    Raises: Failed at the end of a child in a test, or after as many failures as `--maxfail` says
    """
    hook, running = session.config.hook, dict[Any, str]()
    while pipes:
        for pipe in wait(pipes):
            try:
                name, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                name, value = "died", running.get(pipe, "no test yet")
            if name == "starts":
                running[pipe] = value
            elif name == "report":
                report = hook.pytest_report_from_serializable(config=session.config, data=value)
                hook.pytest_runtest_logreport(report=report)
            elif name == "ends":
                hook.pytest_runtest_logfinish(nodeid=running[pipe], location=value)
            elif name == "died":
                session.shouldfail = f"the process of {value} died"
            else:
                pipes.remove(pipe)  # type: ignore[arg-type]
            if session.shouldfail:
                raise session.Failed(session.shouldfail)


class _Sender:
    """The reporter of a child."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._pipe.send(("starts", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_runtest_logfinish(self, location: tuple[str, int | None, str]) -> None:
        self._pipe.send(("ends", location))


def _run_in_child(session: pytest.Session, files: list[list[pytest.Item]], queue: int, pipe: Connection) -> NoReturn:
    """Run the tests of one file after another of the queue, and end this process."""
    plugins = session.config.pluginmanager
    try:
        die_with_parent(os.getppid())
        plugins.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115  the process ends with it
        plugins.register(_Sender(session.config, pipe))
        capture: Any = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the parent
        capture.start_global_capturing()
        capture.suspend_global_capture()

        def items() -> Iterator[pytest.Item]:
            while number := os.read(queue, 2):
                yield from files[int.from_bytes(number, "big")]

        for item, following in pairwise(chain(items(), [None])):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        pipe.send(("done", None))
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)
