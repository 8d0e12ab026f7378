"""The slow nodes and links of a run: the delays of messages by sender and receiver (C4D, HPCA 2025), and their cost.

A message takes from the moment both sides have posted it until it has arrived. A cell of the matrix is the mean of such
delays: small messages may pass a slow link at once, and wait behind large ones now and then. Its peers are cells
between the same pipeline stages. If all cells of a row are slow, the node is slow to send; of a column, to receive; a
single slow cell is a link.

Most of a late message is hidden: compute goes on with other micro-batches, and a pipeline has slack. What is left shows
where it is received. Peers are the other ranks of the same pipeline stage, which run the same schedule with the same
bubble; a rank that waits longer than they do ends its part of the step later by as much, unless it catches up: then its
peers do not wait for it in the reductions of gradients. The excess of the messages themselves is a bound as well: a
receiver may also wait for a slow rank before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from megascale.layout.topology import DATA_AXES
from megascale.operate.diagnose.slow.finding import CulpritKind, SlowCause, SlowCulprit
from megascale.operate.diagnose.slow.peers import MAD_TO_DEVIATION, MIN_SCORE, lower_median, peer_median
from megascale.operate.diagnose.slow.step_cube import Booleans, Columns, Floats, Integers, Places, StepCube, dictionary
from megascale.operate.diagnose.slow.step_levels import StepLevels

MIN_RATIO = 1.5  # smallest ratio of a slow cell to its peers

FEW_CELLS, MIN_RATIO_OF_FEW = 3, 3.0
"""Fewer cells between the same stages than these do not show how much healthy ones differ; their smallest ratio."""

MIN_EXCESS_S = 50e-6  # smallest excess of a slow cell: below, the clocks and the threads that note the end differ
NOISE_FLOOR = 0.05  # smallest deviation of a cell's mean, as a share of the peers'

Edge = tuple[int, int]
"""Sending and receiving unit: nodes, or ranks if all are on one node."""

PathKind = Literal["send", "receive", "node", "link"]

SIDES: dict[PathKind, str] = {
    "send": "only its sends are slow", "receive": "only its receives are slow",
    "node": "its sends and its receives are slow", "link": "no other link of either end, if any, is slow",
}  # fmt: skip


class Messages(NamedTuple):
    """The messages of which both sides are known, by sender, receiver and step: `delay` in seconds."""

    sender: Integers
    receiver: Integers
    step: Integers
    delay: Floats

    @classmethod
    def of_table(cls, events: Columns, places: Places) -> Messages:
        """Pair the sends and receives in the table `events`."""

        def rows_with(name: str, text: str) -> Booleans:
            values, code = dictionary(events[name])
            return np.array([value == text for value in values], bool)[code]

        receives, forward = rows_with("name", "receive"), rows_with("direction", "forward")
        at = np.flatnonzero((np.asarray(events["peer"]) >= 0) & (receives | rows_with("name", "send")))
        receives, rank, peer = receives[at], np.asarray(events["rank"])[at], np.asarray(events["peer"])[at]
        sender, receiver = np.where(receives, peer, rank), np.where(receives, rank, peer)
        numbers = [np.asarray(events[key])[at] for key in ("attempt", "step", "stage", "microbatch", "layer")]
        order = np.lexsort((receives, forward[at], *numbers, receiver, sender))
        keys = [column[order] for column in (sender, receiver, forward[at], *numbers)]
        receives, at = receives[order], at[order]
        paired = ~receives[:-1] & receives[1:]
        for column in keys:
            paired &= column[:-1] == column[1:]
        send, receive = at[:-1][paired], at[1:][paired]
        start, end = np.asarray(events["start_ns"]), np.asarray(events["end_ns"])
        delay = np.maximum(0, end[receive] - np.maximum(start[send], start[receive])) / 1e9
        sender, receiver, step = (keys[number][:-1][paired] for number in (0, 1, 4))
        known = (places.index(sender) >= 0) & (places.index(receiver) >= 0)
        order = np.lexsort((step[known], receiver[known], sender[known]))
        return cls(*(column[known][order] for column in (sender, receiver, step, delay)))

    def within(self, first: int, last: int) -> Messages:
        """Return the messages of steps `first` to `last`."""
        mine = (self.step >= first) & (self.step <= last)
        return Messages(*(column[mine] for column in self))


@dataclass(frozen=True)
class SlowPath:
    """A slow node or link. `kind` "send", "receive" or "node" (both), or "link"; `delay_s`, `peer_s`: mean delay in its
    slowest cell and in the cell's peers. `per_step_s`: the excess of all messages of a step that take the path one
    after another, the most that a step can lose. `receivers`: ranks to which the path is slow, and which may wait for
    it.
    """

    kind: PathKind
    culprit: SlowCulprit
    delay_s: float
    peer_s: float
    per_step_s: float
    receivers: tuple[int, ...]


def slow_paths(found: Messages, places: Places) -> Iterator[SlowPath]:
    """Yield the slow nodes and links by the delays of messages, in cells of ranks that send to each other.

    Beside the median of its peers counts the deviation among them, or the error of the cell's mean and of the peers',
    where that is larger.
    """
    sender, receiver, step, delay = found
    changes = np.diff(sender) + np.diff(receiver) * 1j != 0
    starts = np.flatnonzero(np.append(True, changes)) if len(sender) else sender
    counts, receiver = np.diff(np.append(starts, len(sender))), receiver[starts]
    ranks = np.stack([places.index(sender[starts]), places.index(receiver)], 1)  # [cells, 2]
    mean = np.add.reduceat(delay, starts) / counts if len(sender) else delay
    steps = max(1, len(np.unique(step)))
    stage, here = places.coords["pp"], places.node[ranks[:, 0]] == places.node[ranks[:, 1]]
    role = (stage[ranks[:, 0]] * (int(stage.max(initial=0)) + 1) + stage[ranks[:, 1]]) * 2 + here
    peer_s, error = peer_median(mean, role), _cell_errors(delay, step, mean, counts, steps)
    spread = MAD_TO_DEVIATION * peer_median(np.abs(mean - peer_s), role)
    errors = np.hypot(error, peer_median(error, role))
    deviation = np.maximum(errors, np.maximum(spread, NOISE_FLOOR * peer_s))
    ratio = np.where(np.bincount(role)[role] >= FEW_CELLS, MIN_RATIO, MIN_RATIO_OF_FEW)
    slow = (mean - peer_s > np.maximum(MIN_SCORE * deviation, MIN_EXCESS_S)) & (mean >= ratio * peer_s)
    excess = (mean - peer_s) * (counts / steps)  # of a step
    units = places.node[ranks] if len(places.nodes) > 1 else ranks
    pairs, pair, cells = np.unique(units, axis=0, return_inverse=True, return_counts=True)
    pair = pair.reshape(-1)
    share = np.bincount(pair, slow, len(pairs)) / cells
    edges = {(int(a), int(b)): bool(part > 0.5) for (a, b), part in zip(pairs, share, strict=True)}
    for kind, ends, chosen in _explain(edges):
        mine = slow & np.array([edge in chosen for edge in edges], bool)[pair]
        worst = np.flatnonzero(mine)[np.argmax(excess[mine])]
        between = stage[ranks[mine]]
        per_step_s = sum(float(excess[mine][(between == one).all(1)].max()) for one in np.unique(between, axis=0))
        nodes = tuple(places.nodes[end] for end in dict.fromkeys(ends)) if len(places.nodes) > 1 else ()
        who: CulpritKind = "link" if kind == "link" else "node" if nodes else "ranks"
        culprits = places.rank[np.unique(ranks[mine][np.isin(units[mine], ends)])]
        yield SlowPath(
            kind, SlowCulprit(who, tuple(map(int, culprits)), nodes), float(mean[worst]), float(peer_s[worst]),
            per_step_s, tuple(map(int, np.unique(receiver[mine]))),
        )  # fmt: skip


def _cell_errors(delay: Floats, step: Integers, mean: Floats, counts: Integers, steps: int) -> Floats:
    """Return the standard error of each cell's mean, of delays in order of cells and steps. The messages of a step
    depend on each other: a step counts once.
    """
    cell = np.repeat(np.arange(len(counts)), counts)
    number = np.cumsum(np.append(0, np.diff(cell) + np.abs(np.diff(step)) != 0)) if len(cell) else cell
    of_step = np.bincount(number, delay) / np.bincount(number)
    cell = cell[np.searchsorted(number, np.arange(len(of_step)))]
    return np.asarray(np.sqrt(np.bincount(cell, (of_step - mean[cell]) ** 2, len(counts))) / steps)


def _explain(edges: Mapping[Edge, bool]) -> Iterator[tuple[PathKind, Edge, set[Edge]]]:
    """Yield the units all of whose edges to or from several others are slow, then the links of the remaining slow
    edges; with the kind, the unit or both ends, and the edges.
    """
    slow = {edge for edge, is_slow in edges.items() if is_slow}
    rest = set(slow)

    def all_slow(unit: int, side: int) -> bool:
        mine = [is_slow for edge, is_slow in edges.items() if edge[side] == unit]
        return len(mine) > 1 and all(mine)

    for unit, _ in Counter(end for edge in slow for end in edge).most_common():
        sides = [side for side in (0, 1) if all_slow(unit, side)]
        chosen = {edge for edge in slow if any(edge[side] == unit for side in sides)}
        if chosen & rest:
            yield "node" if len(sides) == 2 else ("send", "receive")[sides[0]], (unit, unit), chosen
            rest -= chosen
    for ends in sorted({(min(edge), max(edge)) for edge in rest}):
        yield "link", ends, rest & {ends, ends[::-1]}


def slow_links(cube: StepCube, levels: StepLevels, events: Columns) -> Iterator[SlowCause]:
    """Yield the slow nodes and links of the stretches of which there are messages in the table `events`."""
    found: dict[str, dict[int, SlowPath]] = {}
    messages = Messages.of_table(events, cube.places)
    for number, stretch in enumerate(levels.stretches):
        mine = messages.within(stretch.first, stretch.last)
        for path in slow_paths(mine, cube.places) if len(mine.step) else ():
            found.setdefault(str(path.culprit), {})[number] = path
    for seen in found.values():
        path = seen[max(seen)]
        evidence = (
            f"messages take {path.delay_s * 1e3:.3g} ms, elsewhere between these stages {path.peer_s * 1e3:.3g} ms",
            SIDES[path.kind],
            f"total delay {path.per_step_s:.3g} s a step",
        )
        yield SlowCause("link", path.culprit, message_waits(cube, path), frozenset(seen), evidence)


def message_waits(cube: StepCube, path: SlowPath) -> Floats:
    """Return by how many seconds the receivers of a path wait longer for messages than the other ranks of their stages,
    but at most what the messages are late, [S].
    """
    received = [at for at, part in enumerate(cube.parts) if part.is_wait and part.name == "receive"]
    waits = cube.wait[:, :, received].sum(2)
    receivers = np.isin(cube.places.rank, path.receivers)
    replica = cube.places.codes(*DATA_AXES)
    behind = np.isin(replica, replica[receivers])
    longer = _most(waits, receivers, ~receivers, cube)
    if not behind.all() and "dp" in cube.axes:
        longer = np.minimum(longer, _most(-cube.wait_of("dp"), behind, ~behind, cube))
    return np.minimum(longer, path.per_step_s)


def _most(values: Floats, mine: Booleans, others: Booleans, cube: StepCube) -> Floats:
    """Return by how much some ranks exceed others of their stage at most, [S], 0 at least."""
    stage, most = cube.places.coords["pp"], [np.zeros(len(cube.steps))]
    for at in np.unique(stage[mine]):
        peers = values[(stage == at) & others]
        most.append(values[(stage == at) & mine].max(0) - (lower_median(peers) if len(peers) else 0.0))
    return np.asarray(np.max(most, 0))
