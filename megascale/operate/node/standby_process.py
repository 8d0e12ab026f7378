"""Processes in standby: they have imported what a rank needs, and wait for the task of a rank.

    parent (an agent)  --  a socket: a task as JSON, with the descriptors that it inherits  -->  process in standby

Imports are most of a start: a task begins seconds earlier in a process in standby than in a new one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from megascale.core.process import die_with_parent, module_command
from megascale.record.start_parts import TASK_TIME_VARIABLE

MOST_DESCRIPTORS = 8  # most descriptors of a task
GIVE_S = 5.0  # seconds in which a task must fit into the socket of a process that does not read it yet

_END = b"\n"


class StandbyProcess:
    """A process in standby, one of `processes` on this host. It ends with this process, or when `close` is called.

    Raises: OSError if it cannot be started
    """

    def __init__(self, processes: int) -> None:
        parent = os.getpid()
        self._channel, end = socket.socketpair()
        try:
            with end:
                self.process = subprocess.Popen(
                    module_command("megascale", "standby", "--channel", str(end.fileno())),
                    env={**os.environ, "LOCAL_WORLD_SIZE": str(processes)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # a rank that is started without standby shows an error of an import
                    pass_fds=[end.fileno()],
                    start_new_session=True,  # Ctrl-C reaches the parent only
                    preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  a call of the kernel, no lock
                )
        except OSError:
            self._channel.close()
            raise

    @property
    def waits(self) -> bool:
        """True unless the process has ended."""
        return self.process.poll() is None

    def give(
        self, arguments: Sequence[str], env: Mapping[str, str], descriptors: Mapping[str, tuple[str, int]], output: int
    ) -> None:
        """Have the process run `megascale ARGUMENTS`, at once or as soon as its imports are done.

        `env`: all of its environment. `descriptors`: by further variable of the environment, a text and a descriptor:
        the value is the text and the number that the descriptor has in the process. `output`: descriptor of its
        stdout and stderr.

        Raises: OSError if the process has ended
        """
        texts = {name: text for name, (text, _) in descriptors.items()}
        task = json.dumps({"arguments": [*arguments], "env": {**env}, "texts": texts}).encode() + _END
        with self._channel as channel:
            channel.settimeout(GIVE_S)
            sent = socket.send_fds(channel, [task], [output, *(number for _, number in descriptors.values())])
            channel.sendall(task[sent:])

    def close(self) -> None:
        """End the process, which holds nothing."""
        self._channel.close()
        self.process.kill()
        self.process.wait()


def take_task(channel: int) -> list[str] | None:
    """Wait for the task of this process, take over its environment and output, and return its arguments; None if there
    will be none.

    `channel`: descriptor of the socket to the parent.
    """
    with socket.socket(fileno=channel) as parent:
        data, numbers, _, _ = socket.recv_fds(parent, 1 << 16, MOST_DESCRIPTORS)
        while more := parent.recv(1 << 16):
            data += more
    if not data.endswith(_END):
        return None
    task = json.loads(data)
    output, *inherited = numbers
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    texts = task["texts"].items()
    os.environ.clear()
    os.environ.update(task["env"])
    os.environ.update({name: f"{text}{number}" for (name, text), number in zip(texts, inherited, strict=True)})
    os.environ[TASK_TIME_VARIABLE] = str(time.clock_gettime(time.CLOCK_BOOTTIME))
    return list(task["arguments"])
