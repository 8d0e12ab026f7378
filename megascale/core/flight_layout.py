"""The layout of a flight record's file: places of fixed size, which the writer fills and readers parse.

    header      numbers of 8 bytes, each written at once: identity, progress, phase, step, the present wait
    run         the run's name
    strings     names of operations and tensors, in the order of their first use; other places hold their index
    totals      (string, double): what a rank counts, such as tokens
    groups      a row for each group, or for each direction and peer of messages: how far this rank is, and its ranks
    events      a ring of the newest actions and communications

All numbers are little-endian. A reader accepts one FORMAT only: change it with any place.
"""

from __future__ import annotations

import struct
from enum import StrEnum

MAGIC = int.from_bytes(b"MSFLIGHT", "little")
FORMAT = 3

WORD = 8
"""Bytes of a number in the header."""

(
    MAGIC_WORD, FORMAT_WORD, RANK, WORLD, PID, ATTEMPT, START, VERSION, HEARTBEAT, UPDATED, PHASE, PHASE_SINCE, STEP,
    STEP_TIME, EVENT_COUNT, GROUP_COUNT, STRING_COUNT, TOTAL_COUNT, WAIT_GROUP, WAIT_SEQUENCE, WAIT_SINCE, WAIT_KIND,
    STEP_SINCE, FIRST_STEP, FOLDER, EXIT_STATUS,
) = range(26)  # fmt: skip
"""Places of the header's numbers. VERSION is odd while the writer writes; times are ns of the host's monotonic clock,
START ns since 1970. FOLDER: key of the run's folder. EXIT_STATUS: one more than the status, 0 before the rank ends.
"""

HEADER_BYTES = 512

RUN_OFFSET, RUN_BYTES = HEADER_BYTES, 128

STRINGS_OFFSET = RUN_OFFSET + RUN_BYTES
STRING_BYTES, STRINGS = 40, 256

TOTALS_OFFSET = STRINGS_OFFSET + STRING_BYTES * STRINGS
TOTAL, TOTALS = struct.Struct("<qd"), 16

GROUPS_OFFSET = TOTALS_OFFSET + TOTAL.size * TOTALS
GROUP_BYTES, GROUPS = 208, 48
GROUP_ENTERED, GROUP_ISSUED, GROUP_COMPLETED, GROUP_KIND, GROUP_PEER, GROUP_SIZE = range(6)
"""Places of a row's numbers, before its name and its runs of ranks."""
GROUP_NUMBERS = 8
NAME_BYTES = 48
RUN_OF_RANKS, RUNS_OF_RANKS = struct.Struct("<3I"), 8
"""First rank, number of ranks and distance; up to RUNS_OF_RANKS such runs describe the ranks of a group."""

EVENTS_OFFSET = GROUPS_OFFSET + GROUP_BYTES * GROUPS
EVENT, EVENTS = struct.Struct("<qqqqqqiiihhHHh10x"), 256
"""Number (from 1), issued, waiting, ended, sequence, bytes; step, peer, micro-batch; chunk, group, name, part, layer:
a multiple of 8 bytes.
"""
EVENT_WAITING, EVENT_ENDED = 2, 3
"""Places of two times among the event's numbers of 8 bytes."""

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
    PROFILE = "profile"


PHASES = tuple(Phase)
"""Phases by the number in the file."""
