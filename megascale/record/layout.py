"""The layout of a rank's log: one file in shared memory, which the rank writes and others read without its help.

    header      numbers of 8 bytes, each written at once: identity, progress, phase, step, the present wait, clock
    run         the run's name
    totals      (text, double): what a rank counts, such as tokens
    groups      a row for each group, or for each direction and peer of messages: how far this rank is, and its ranks
    note        a text in JSON for readers, such as where events are stored
    texts       names, in the order of their first use; other places hold their index
    loads       of the experts of a step, relative to the mean of their layer
    places      a ring of the newest actions, communications, activities of the host, and steps

What comes before the places is the head: with the newest places it is the rank's state, from which a hang is explained.

**A place** has PLACE_BYTES, of EVENT_FIELDS or STEP_FIELDS, the only definition of an event: the writer's `struct`,
the readers' numpy types and the event store's columns are made of them. A communication or an action is written once,
when it is issued. Later stores patch it: `waiting_ns` and `ended_ns` by the host's clock, as soon as the host knows;
`issue`, `start`, `end` and `exposed`, in the device's time, once the device has passed; `state`, which is last in a
place, makes it EVENT then. Activities and steps are written as a whole when they end.

**Readers** never disturb the rank. A copy of the head is consistent if VERSION was even and the same before and after
it. A place is whole if it has its own number, counted from 1, if it was EVENT or STEP_END before the copy, and if after
the copy COUNT has not come within a ring's length of it, with one place more for the write that is under way.

All numbers are little-endian. A reader accepts one FORMAT only: change it with any place.
"""

from __future__ import annotations

import struct
from enum import StrEnum

MAGIC = int.from_bytes(b"MSRECORD", "little")
FORMAT = 7

WORD = 8  # bytes of a number in the header

(
    MAGIC_WORD, FORMAT_WORD, RANK, WORLD, PID, ATTEMPT, START, PLACES, FOLDER, VERSION, HEARTBEAT, UPDATED, PHASE,
    PHASE_SINCE, STEP, FIRST_STEP, STEP_TIME, WAIT_GROUP, WAIT_SEQUENCE, WAIT_SINCE, WAIT_KIND, EXIT_STATUS, COUNT,
    GROUP_COUNT, TEXT_COUNT, TOTAL_COUNT, READY, STORED_ATTEMPT, EPOCH, TP, CP, DP, PP, EP, DP_SHARD, PEAK_FLOPS,
) = range(36)  # fmt: skip
"""Places of the header's numbers. VERSION is odd while the writer writes; times are ns of the host's monotonic clock,
START ns since 1970. FOLDER: key of the run's folder. EXIT_STATUS: one more than the status, 0 before the rank ends.
PLACES: their number. COUNT: places written so far. READY: 1 once the numbers after it are known: the attempt in the
event store, ns since 1970 on rank 0's clock at the zero of this host's monotonic clock, the coordinates, and the
device's FLOP/s, 0 if unknown.
"""

COORDINATES = {"tp": TP, "cp": CP, "dp": DP, "pp": PP, "ep": EP, "dp_shard": DP_SHARD}
"""Places of a rank's coordinates by axis; its index on other axes follows from them."""

HEADER_BYTES = 512

RUN_OFFSET, RUN_BYTES = HEADER_BYTES, 128

TOTALS_OFFSET = RUN_OFFSET + RUN_BYTES
TOTAL, TOTALS = struct.Struct("<qd"), 16

GROUPS_OFFSET = TOTALS_OFFSET + TOTAL.size * TOTALS
GROUP_BYTES, GROUPS = 208, 48
GROUP_ENTERED, GROUP_ISSUED, GROUP_COMPLETED, GROUP_KIND, GROUP_PEER, GROUP_SIZE = range(6)
"""Places of a row's numbers, before its name and its runs of ranks."""
GROUP_NUMBERS = 8
NAME_BYTES = 48
RUN_OF_RANKS, RUNS_OF_RANKS = struct.Struct("<3I"), 8
"""First rank, number of ranks and distance; up to RUNS_OF_RANKS such runs describe the ranks of a group."""

NOTE_OFFSET, NOTE_BYTES = GROUPS_OFFSET + GROUP_BYTES * GROUPS, 8192

TEXTS_OFFSET = NOTE_OFFSET + NOTE_BYTES
TEXT_BYTES, TEXTS = 64, 1024
OTHER_TEXT = 1  # index of the text that stands for those that no longer fit; index 0 is the empty text

LOADS_OFFSET = TEXTS_OFFSET + TEXT_BYTES * TEXTS
LOADS_HEAD, LOADS = struct.Struct("<4q"), 1 << 15
"""Version (odd during a write), step, layers and experts, before at most LOADS numbers [layers, experts] of 2 bytes."""

PLACES_OFFSET = LOADS_OFFSET + LOADS_HEAD.size + 2 * LOADS

Fields = tuple[tuple[str, str], ...]
"""Names of fields, and their types as numpy writes them."""

EVENT_FIELDS: Fields = (
    ("number", "i8"), ("issued_ns", "i8"), ("waiting_ns", "i8"), ("ended_ns", "i8"), ("row_sequence", "i8"),
    ("sequence", "i8"), ("bytes", "i8"), ("issue", "f8"), ("start", "f8"), ("end", "f8"), ("exposed", "f8"),
    ("step", "i4"), ("microbatch", "i4"), ("peer", "i4"), ("layer", "i2"), ("stage", "i2"), ("chunk", "i2"),
    ("row", "i2"), ("axis", "u2"), ("name", "u2"), ("part", "u2"), ("group_name", "u2"), ("direction", "u2"),
    ("state", "u2"),
)  # fmt: skip
"""Fields of an event. `issued_ns` and the two after it are of the host's clock, in ns; 0: not yet. `issue`, `start`,
`end` are when the device came to it, and `exposed` how long compute waited, in seconds. `row`: in the table of groups,
or ACTION or ACTIVITY; `row_sequence` counts its communications, `sequence` those of the group. Types u2 are texts.
"""

STEP_FIELDS: Fields = (
    ("number", "i8"), ("start", "f8"), ("end", "f8"), ("train", "f8"), ("tokens", "i8"), ("peak_memory_bytes", "i8"),
    ("flops", "f8"), ("loss", "f8"), ("grad_norm", "f8"), ("step", "i4"), ("tags", "u4"), ("unused", "V38"),
    ("state", "u2"),
)  # fmt: skip
"""Fields of a step. `train`: seconds without evaluations and saves; `tags`: a bit for each of the store's tags."""


def pack_format(fields: Fields) -> struct.Struct:
    """Return the format of a place with these fields."""
    codes = {"i8": "q", "f8": "d", "i4": "i", "u4": "I", "i2": "h", "u2": "H"}
    return struct.Struct("<" + "".join(codes[kind] if kind in codes else f"{kind[1:]}x" for _, kind in fields))


def offset_of(name: str) -> int:
    """Return the byte of an event at which a field begins."""
    names = [field for field, _ in EVENT_FIELDS]
    return pack_format(EVENT_FIELDS[: names.index(name)]).size


EVENT_STRUCT, STEP_STRUCT = pack_format(EVENT_FIELDS), pack_format(STEP_FIELDS)
PLACE_BYTES = EVENT_STRUCT.size

ACTION, ACTIVITY = -1, -2
"""Rows of events without a row in the table of groups: actions of compute, and activities of the host."""

OPEN, EVENT, STEP_END, UNSTORED = range(4)
"""States of a place: an event before its end; an event with its times; a step; an event that stays without times and is
not stored, such as control data.
"""

CAPACITY = 1 << 15
"""Places of a log from which events are stored, 3.9 MB: some 20 s of a large job's rank. A collector reads twice a
second.
"""

SMALL_CAPACITY = 512  # places of a log of which only the state is read
NEWEST = 256  # most actions and communications in a rank's state


def log_bytes(capacity: int) -> int:
    """Return the bytes of a log with `capacity` places."""
    return PLACES_OFFSET + capacity * PLACE_BYTES


COLLECTIVE, SEND, RECEIVE, CONTROL = "collective", "send", "receive", "control"
GROUP_KINDS = (COLLECTIVE, SEND, RECEIVE, CONTROL)
"""Kinds of a row: collectives of a group, messages to or from a peer, control data through the job's store."""

MESSAGE_KINDS = frozenset({SEND, RECEIVE})

NO_WAIT, ISSUING, WAITING, DEVICE = range(4)
"""Kinds of the present wait: none, a communication being issued, the end of a communication, the device."""


class Phase(StrEnum):
    """The phases of a rank, in the order of a run's start."""

    IMPORT = "import"
    RENDEZVOUS = "rendezvous"
    GROUPS = "groups"
    BUILD = "build"
    LOAD = "load"
    DATA = "data"
    STEP = "step"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    GC = "gc"
    DONE = "done"
    PROFILE = "profile"
    SITES = "sites"


PHASES = tuple(Phase)  # phases by the number in the file
STARTING = (Phase.IMPORT, Phase.RENDEZVOUS, Phase.GROUPS, Phase.BUILD, Phase.LOAD)  # before a rank's first step

TAGS = ("first step", "gc", "evaluation", "checkpoint", "data", "restart", "profile")
"""Parts of a step besides training, by the bits of its `tags`, which an ordinary step does not have.
"""
