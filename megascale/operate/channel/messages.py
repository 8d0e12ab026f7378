"""Messages between the driver of a job and the agents of its nodes: what each says, and its form on the wire.

    agent -> driver    Hello, Heartbeat, RanksEnded, StoreOpened, Records, Stacks, CheckDone
    driver -> agent    Welcome, OpenStore, Prepare, Start, Stop, Collect, Check, Leave

A message on the wire is the name of its class, a space and a JSON object of its fields, in which a rank's status is an
array. An unknown name or field, or a value of another type, is an error: both ends run the same version. Messages do
not name their sender, whom the connection tells. An agent that has connected again repeats its Hello, StoreOpened and
RanksEnded, so the driver takes each of them any number of times.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megascale.core.errors import Exit
from megascale.core.run_folder import RunFolder
from megascale.record.rank_state import LAST_EVENTS, RankStatus


class MessageError(ValueError):
    """A peer sent a message of an unknown kind or form."""


class _Checked:
    """Base of the classes below: pydantic checks their fields as they come from the wire."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


@dataclass(frozen=True)
class RankEnd(_Checked):
    """The end of a rank's process.

    `status`: exit status, negative for a signal, None if only another launcher knows it. `time`: seconds since the
    epoch. `step`: the last that the rank had begun, 0 before the first. From the rank's error file, where it wrote one:
    `error`, `error_kind` (the name of the exception's class), `peer_lost` (it only lost another rank), `named` (ranks
    whose state the error calls wrong), `exit_status` and `in_order` (it left the job as it wrote). `last_lines`: of its
    output. `patterns`: names of the observations in its output (`health.observations`). `stopped`: the agent had sent a
    signal before, by order. `unordered`: the signal at which the rank has stopped the job, and which nobody of the job
    had sent, 0 for none. `started`: False if the process could not be started.
    """

    rank: int
    status: int | None
    time: float
    error: str | None = None
    error_kind: str = ""
    peer_lost: bool = False
    peers: tuple[int, ...] = ()
    named: tuple[int, ...] = ()
    exit_status: int | None = None
    in_order: bool = False
    last_lines: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    stopped: bool = False
    step: int = 0
    unordered: int = 0
    started: bool = True


@dataclass(frozen=True)
class Hello(_Checked):
    """An agent joins, or connects again.

    `node`: its name, unique in the job. `host`: the name of the host; `address`: where other nodes reach it. `slots`:
    ranks that it can run. `attempt` and `ranks`: the attempt that it runs now and its ranks that live, None for none:
    a new driver takes over. `observer`: another launcher starts the ranks of `run`, and the agent restarts nothing.
    `started`: start of the agent's process, seconds since the epoch: the latest agent of a node is the one that counts.
    """

    node: str
    host: str
    address: str
    slots: int
    attempt: int | None = None
    ranks: tuple[int, ...] = ()
    observer: bool = False
    run: str = ""
    started: float = 0.0


@dataclass(frozen=True)
class Heartbeat(_Checked):
    """The state of a node, every `fault.heartbeat_s`. `time`: seconds since the epoch, of the node's clock. `host`:
    metrics of the host by name (`health.host_metrics`). `world`: ranks of the job, from an observer that found some.
    `signalled`: the agent has got a stop signal.
    """

    time: float
    attempt: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    host: Mapping[str, float] | None = None
    world: int = 0
    signalled: bool = False


@dataclass(frozen=True)
class RanksEnded(_Checked):
    """The ends of ranks of an attempt. `stuck`: ranks that SIGKILL does not end, in uninterruptible sleep."""

    attempt: int
    ends: tuple[RankEnd, ...]
    stuck: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoreOpened(_Checked):
    """The node of rank 0 listens for the job's store. `address`: host:port."""

    attempt: int
    address: str


@dataclass(frozen=True)
class Records(_Checked):
    """Flight records of the node's ranks, by rank, as `RankState.to_dict`. `states`: letters of /proc/PID/stat."""

    attempt: int
    records: Mapping[int, dict[str, Any]]
    states: Mapping[int, str]


@dataclass(frozen=True)
class Stacks(_Checked):
    """The stacks of the node's ranks, by rank, as text of py-spy."""

    attempt: int
    stacks: Mapping[int, str]


@dataclass(frozen=True)
class CheckDone(_Checked):
    """The result of a check of the node. `error`: why there is no result, "" otherwise."""

    id: int
    name: str
    result: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True)
class Welcome(_Checked):
    """The answer to a Hello: the settings of `[fault]` that an agent needs. Without it an agent has their defaults.

    `run`: the run's name, `folder`: its folder; `metrics_address`, `metrics_port`: as in `[observe]`.
    """

    heartbeat_s: float
    poll_s: float
    agent_grace_s: float
    stop_grace_s: float
    run: str = ""
    folder: str = ""
    metrics_address: str = ""
    metrics_port: int = 0


@dataclass(frozen=True)
class OpenStore(_Checked):
    """Listen for an attempt's store, and answer StoreOpened. `reachable`: by other nodes; else on loopback."""

    attempt: int
    reachable: bool = True


@dataclass(frozen=True)
class Prepare(_Checked):
    """Keep a number of processes in standby, with the imports of a rank (`node.standby_process`)."""

    processes: int


@dataclass(frozen=True)
class Start(_Checked):
    """Start ranks of an attempt: `python -m megascale ARGUMENTS`.

    `run`: the run's name, in the names of flight records. `store`: host:port of the job's store. `logs`: folder of the
    attempt's logs. `env`: added to the agent's own environment; no secret, which the ranks read from a descriptor.
    `folder`: of the run, which must be there; None for any.
    """

    attempt: int
    run: str
    world: int
    ranks: tuple[int, ...]
    store: str
    arguments: tuple[str, ...]
    logs: str
    env: Mapping[str, str]
    folder: RunFolder | None = None


@dataclass(frozen=True)
class Stop(_Checked):
    """Order the ranks of an attempt to end, and kill them after `grace_s` seconds; the answer is RanksEnded for all.
    `save`: the ranks may finish their step and save meanwhile; otherwise they end at once.
    """

    attempt: int
    grace_s: float
    save: bool = False


@dataclass(frozen=True)
class Collect(_Checked):
    """Answer with Records; with `stacks` also with Stacks. `ranks`: None for all of the node. `events`: most events of
    each record.
    """

    attempt: int
    stacks: bool = False
    ranks: tuple[int, ...] | None = None
    events: int = LAST_EVENTS


@dataclass(frozen=True)
class Check(_Checked):
    """Run a check of `health.checks` on the node, and answer CheckDone with the same id."""

    id: int
    name: str
    arguments: Mapping[str, Any]
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Leave(_Checked):
    """End the agent, after its ranks. `status`: its exit status. `copies`: folder of the run's copies in memory, which
    the agent removes, because the node was replaced; "" to keep them.
    """

    reason: str
    status: int = Exit.OK
    copies: str = ""


AgentMessage = Hello | Heartbeat | RanksEnded | StoreOpened | Records | Stacks | CheckDone
DriverMessage = Welcome | OpenStore | Prepare | Start | Stop | Collect | Check | Leave
Message = AgentMessage | DriverMessage

_CLASSES: dict[bytes, type] = {kind.__name__.encode(): kind for kind in get_args(Message)}


def to_json(message: Message) -> bytes:
    """Return the form of a message on the wire."""
    kind: type = type(message)
    return kind.__name__.encode() + b" " + _adapter(kind).dump_json(message)


def from_json(data: bytes) -> Message:
    """Return the message of bytes from the wire. Raises: MessageError"""
    name, _, body = data.partition(b" ")
    if name not in _CLASSES:
        raise MessageError(f"a message of unknown kind {name[:40]!r}")
    try:
        return _adapter(_CLASSES[name]).validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise MessageError(f"a {name.decode()} of unknown form: {where}: {first['msg']}") from None


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
