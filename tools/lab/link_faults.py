"""Faults of the links of a testbed, whose host i is node i of the job."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace

from lab.testbed import HostLink, Testbed
from megascale.config.injection import Fault

Call = Callable[[], object]


def link_fault(fault: Fault, testbed: Testbed) -> tuple[Call, Call]:
    """Return two calls, the fault and its end."""
    return LINK_FAULTS[fault.kind](fault, testbed)


def _cut(fault: Fault, testbed: Testbed) -> tuple[Call, Call]:
    node = _node(fault)
    if fault.peer is None:
        return lambda: testbed.connect(node, up=False), lambda: testbed.connect(node, up=True)
    return _both(_mute(fault, testbed), _mute(replace(fault, node=fault.peer, peer=node), testbed))


def _mute(fault: Fault, testbed: Testbed) -> tuple[Call, Call]:
    node = _node(fault)
    peers = [host.index for host in testbed.hosts if host.index != node] if fault.peer is None else [fault.peer]
    return lambda: testbed.reach(node, peers, reaches=False), lambda: testbed.reach(node, peers, reaches=True)


def _reset(fault: Fault, testbed: Testbed) -> tuple[Call, Call]:
    peers = testbed.hosts if fault.peer is None else [testbed.hosts[fault.peer]]
    addresses = [word for host in peers for word in ("or", "dst", host.address)][1:]
    command = ["ss", "--kill", "--tcp", "state", "established", "(", *addresses, ")"]
    run = lambda: subprocess.run(command, check=True, capture_output=True)  # noqa: E731
    return lambda: testbed.call_on_host(_node(fault), run), lambda: None


def _throttle(fault: Fault, testbed: Testbed) -> tuple[Call, Call]:
    slow = replace(testbed.link, bits_per_second=fault.mbit * 1e6)
    return _set_link(fault, testbed, slow)


def _delay(fault: Fault, testbed: Testbed) -> tuple[Call, Call]:
    return _set_link(fault, testbed, replace(testbed.link, delay_s=fault.delay_s))


def _set_link(fault: Fault, testbed: Testbed, link: HostLink) -> tuple[Call, Call]:
    node = _node(fault)
    return lambda: testbed.set_link(link, node), lambda: testbed.set_link(testbed.link, node)


def _both(one: tuple[Call, Call], other: tuple[Call, Call]) -> tuple[Call, Call]:
    return lambda: (one[0](), other[0]()), lambda: (one[1](), other[1]())


def _node(fault: Fault) -> int:
    assert fault.node is not None  # the grammar requires one
    return fault.node


LINK_FAULTS: Mapping[str, Callable[[Fault, Testbed], tuple[Call, Call]]] = {
    "cut_link": _cut,
    "mute_link": _mute,
    "reset_link": _reset,
    "throttle_link": _throttle,
    "delay_link": _delay,
}
"""By kind of fault: the two calls of `link_fault`."""
