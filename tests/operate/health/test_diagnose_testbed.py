"""`megascale doctor nodes` under torchrun on hosts with real links: a throttled or cut link is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from lab.hosts import run_torchrun
from lab.testbed import Host, HostLink, Testbed
from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret
from tests.tools.lab.test_testbed import missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

MBIT = 1e6


def on_host(host: Host, *command: str) -> None:
    subprocess.run(["nsenter", f"--net={host.namespace}", *command], check=True, timeout=30)


def doctor(testbed: Testbed, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the command on all hosts; return rank 0's exit status and JSON object."""
    command = ["-m", "megascale", "doctor", "nodes", "--json", *arguments]
    results = run_torchrun(testbed, 1, command, {SECRET_VARIABLE: new_secret()}, timeout=300.0)
    assert results[0].stdout, [result.stderr for result in results]
    return results[0].status, json.loads(results[0].stdout)


def names(report: dict[str, Any]) -> list[str]:
    """The nodes, in the order of their hosts: all have this machine's name, and the number of their rank."""
    found = {verdict["node"] for verdict in report["verdicts"]}
    return sorted(found, key=lambda name: int(name.rpartition("#")[2]))


def test_links_of_a_testbed() -> None:
    with Testbed(4, HostLink(400 * MBIT)) as testbed:
        status, report = doctor(testbed, "--checks", "paths")
        assert (status, report["ok"]) == (0, True), report
        nodes = names(report)
        assert len(nodes) == 4

        throttled = "qdisc replace dev eth0 root handle 1: tbf rate 40mbit burst 131072 limit 655360"
        on_host(testbed.hosts[2], "tc", *throttled.split())
        status, report = doctor(testbed, "--checks", "paths")
        assert (status, list(report["bad_nodes"]), report["bad_links"]) == (1, [nodes[2]], []), report
        assert report["bad_nodes"][nodes[2]][0].startswith("link: slow with")
        testbed.set_link(HostLink(400 * MBIT))

        cut = testbed.hosts[1], testbed.hosts[3]
        for one, other in (cut, cut[::-1]):
            on_host(one, "ip", "route", "add", "blackhole", f"{other.address}/32")
        status, report = doctor(testbed, "--checks", "paths")
        assert (status, report["bad_nodes"]) == (1, {}), report
        assert [link["nodes"] for link in report["bad_links"]] == [[nodes[1], nodes[3]]]
        assert "no connection" in report["bad_links"][0]["reason"]


def test_nodes_that_are_processes() -> None:
    """Without a launcher: three processes of this host are all well, and each check has its line."""
    done = subprocess.run(
        [sys.executable, "-m", "megascale", "doctor", "nodes", "--processes", "2"],
        capture_output=True, text=True, check=False, timeout=280, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    for check in ("limits", "memory", "disk", "loopback", "known_gemm", "gemm", "reach", "clock", "link"):
        assert sum(line.split()[1:2] == [check] for line in lines) == 2, done.stdout + done.stderr
    assert lines[-1].startswith("2 nodes in")
