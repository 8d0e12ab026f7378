"""The layout of a flight record's file: places of fixed size, which the writer fills and readers parse.

    header      numbers of 8 bytes, each written at once: identity, progress, phase, step, the present wait
    counts      for each row of `groups`, how far this rank is
    run         the run's name
    strings     names of operations and tensors, in the order of their first use; other places hold their index
    totals      (string, double): what a rank counts, such as tokens
    groups      a row for each group, or for each direction and peer of messages: its name and ranks
    events      a ring of the newest actions and communications

All numbers are little-endian. A reader accepts one FORMAT only: change it with any place.

A training step evicts the record from the caches, so a write costs what it touches: three cache lines for a
communication, which are those of the present wait, of the counts, and of the event.
"""

from __future__ import annotations

import struct
from enum import StrEnum

MAGIC = int.from_bytes(b"MSFLIGHT", "little")
FORMAT = 2

WORD = 8
"""Bytes of a number in the header."""

(
    MAGIC_WORD, FORMAT_WORD, RANK, WORLD, PID, ATTEMPT, START, HEARTBEAT, PROGRESS, UPDATED, WAIT_KIND, WAIT_GROUP,
    WAIT_SEQUENCE, WAIT_SINCE, PHASE, PHASE_SINCE, STEP, STEP_SINCE, FIRST_STEP, STEP_TIME, GROUP_COUNT, STRING_COUNT,
    TOTAL_COUNT,
) = range(23)  # fmt: skip
"""Places of the header's numbers. PROGRESS counts the writes; times are ns of the host's monotonic clock, START is
in ns since 1970.
"""

HEADER_BYTES = 512

WRITE_OFFSET, WRITE = PROGRESS * WORD, struct.Struct("<6q")
"""PROGRESS to WAIT_SINCE: a cache line that each write of a communication packs at once."""

COUNTS_OFFSET, COUNTS = HEADER_BYTES, 2
"""Issued and completed operations of a row."""
COUNT_ISSUED, COUNT_COMPLETED = range(2)

GROUPS = 48
"""Most rows."""

RUN_OFFSET, RUN_BYTES = COUNTS_OFFSET + COUNTS * WORD * GROUPS, 128

STRINGS_OFFSET = RUN_OFFSET + RUN_BYTES
STRING_BYTES, STRINGS = 40, 256

TOTALS_OFFSET = STRINGS_OFFSET + STRING_BYTES * STRINGS
TOTAL, TOTALS = struct.Struct("<qd"), 16

GROUPS_OFFSET = TOTALS_OFFSET + TOTAL.size * TOTALS
GROUP_BYTES = 176
GROUP_KIND, GROUP_PEER, GROUP_SIZE = range(3)
"""Places of a row's numbers, before its name and its runs of ranks."""
GROUP_NUMBERS = 4
NAME_BYTES = 48
RUN_OF_RANKS, RUNS_OF_RANKS = struct.Struct("<3I"), 8
"""First rank, number of ranks and distance; up to RUNS_OF_RANKS such runs describe the ranks of a group."""

EVENTS_OFFSET = -(-(GROUPS_OFFSET + GROUP_BYTES * GROUPS) // 64) * 64
EVENT, EVENTS = struct.Struct("<qqqqqiiihhHHh2x"), 256
"""Number (from 1), issued, ended, sequence, bytes; step, peer, micro-batch; chunk, group, name, part, layer: a cache
line of 64 bytes.
"""
EVENT_ENDED = 2
"""Place of a time among the event's numbers of 8 bytes."""

FILE_BYTES = EVENTS_OFFSET + EVENT.size * EVENTS

OTHER_STRING = 1
"""Index of the string that stands for those that no longer fit; index 0 is the empty string."""

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


PHASES = tuple(Phase)
"""Phases by the number in the file."""
