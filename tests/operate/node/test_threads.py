"""Calls of the event loop: in threads, and at the end of a process."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading

import pytest

from megascale.operate.driver.scheduler.processes import run
from megascale.operate.node.threads import call_at_end, call_in_thread


def test_a_call_is_cancelled_also_as_its_result_arrives() -> None:
    """Such as a sample of an agent that leaves, whose loop would go on for ever."""

    def answer() -> None: ...

    async def cancel() -> bool:
        call = asyncio.ensure_future(call_in_thread(answer, 60))
        await asyncio.sleep(0)  # its thread starts
        for thread in threading.enumerate():
            if thread.name == "answer":
                thread.join()  # the loop's next call is the result's
        asyncio.get_running_loop().call_soon(call.cancel)
        await asyncio.wait([call])
        return call.cancelled()

    assert asyncio.run(cancel())


def test_the_end_of_a_process_is_told() -> None:
    async def wait() -> int:
        process, ended = subprocess.Popen([sys.executable, "-c", ""]), asyncio.Event()
        call_at_end(process.pid, ended.set)
        await ended.wait()
        return process.wait()

    assert asyncio.run(wait()) == 0


def test_who_cannot_be_told_of_an_end_learns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a free descriptor a command raises, in place of a wait without end."""

    def no_descriptor(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        asyncio.run(run("true"))
