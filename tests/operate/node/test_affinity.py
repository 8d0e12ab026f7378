"""CPU affinity: real processes, with a fake description of a host's devices."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megascale.operate.node.affinity import CPU_BIND_ENV, bind_to_local_cores, parse_cpu_list

GPU = "0000:dc:00.0"
HERE = sorted(os.sched_getaffinity(0))


def host(folder: Path, near: str, node: str = "1") -> Path:
    """Write a host's description of a device."""
    (folder / GPU).mkdir()
    (folder / GPU / "numa_node").write_text(f"{node}\n")
    (folder / GPU / "local_cpulist").write_text(f"{near}\n")
    return folder


BOUND = """
import os, sys, threading
from pathlib import Path
from megascale.operate.node.affinity import bind_to_local_cores

end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
print(sorted(bind_to_local_cores(sys.argv[1], devices=Path(sys.argv[2]))))
print([sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")])
end.set()
"""


@pytest.mark.skipif(len(HERE) < 2, reason="one core: there is nothing to choose")
def test_a_process_and_its_threads_are_bound_to_the_near_cores(tmp_path: Path) -> None:
    chosen = HERE[:1]
    devices = host(tmp_path, f"{chosen[0]},{max(HERE) + 1}-{max(HERE) + 8}")  # of which some are not ours
    env = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", BOUND, GPU, str(devices)]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert out == f"{chosen}\n[{chosen}, {chosen}]\n"


def test_where_it_is_left_alone(tmp_path: Path) -> None:
    first = str(HERE[0])
    assert not bind_to_local_cores(None, {})
    assert not bind_to_local_cores(GPU, {}, tmp_path), "the host does not know the device"
    devices = host(tmp_path, first)
    assert not bind_to_local_cores(GPU, {CPU_BIND_ENV: "none"}, devices)
    if len(HERE) > 1:
        assert not bind_to_local_cores(GPU, {"OMP_NUM_THREADS": "2"}, devices), "fewer cores than threads"
    (devices / GPU / "numa_node").write_text("-1\n")
    assert not bind_to_local_cores(GPU, {}, devices), "one node"
    (devices / GPU / "numa_node").write_text("0\n")
    for far in (str(max(HERE) + 1), f"0-{max(HERE)}", "", "every"):
        (devices / GPU / "local_cpulist").write_text(far)
        assert not bind_to_local_cores(GPU, {}, devices), far
    assert sorted(os.sched_getaffinity(0)) == HERE and threading.active_count() > 0


def test_the_kernel_s_notation() -> None:
    assert parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpu_list("5") == {5}
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpu_list("")
