"""The delays of messages by sender and receiver, and the slow nodes and links that explain them (C4D, HPCA 2025).

A message takes from the moment both sides have posted it until it has arrived. A cell of the matrix is the mean of such
delays: small messages may pass a slow link at once, and wait behind large ones now and then. Its peers are cells
between the same pipeline stages. If all cells of a row are slow, the node is slow to send; of a column, to receive; a
single slow cell is a link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from megascale.operate.diagnose.slow.heatmap import MIN_SCORE
from megascale.operate.diagnose.slow.step_cube import (
    MAD_TO_DEVIATION,
    Booleans,
    Columns,
    Floats,
    Integers,
    Places,
    lower_median,
)

MIN_RATIO = 1.5
"""Smallest ratio of a slow cell to its peers."""

FEW_CELLS, MIN_RATIO_OF_FEW = 3, 3.0
"""Fewer cells between the same stages than these do not show how much healthy ones differ; their smallest ratio."""

MIN_EXCESS_S = 50e-6
"""Smallest excess of a slow cell: below, the clocks and the threads that note the end differ."""

NOISE_FLOOR = 0.05
"""Smallest deviation of a cell's mean, as a share of the peers'."""

Edge = tuple[int, int]
"""Sending and receiving unit: nodes, or ranks if all are on one node."""

PathKind = Literal["send", "receive", "node", "link"]


@dataclass(frozen=True)
class SlowPath:
    """A slow node or link. `units`: the node, or the two ends of the link; ranks if all ranks are on one node.

    `kind` "send", "receive" or "node" (both), or "link"; `delay_s`, `peer_s`: mean delay in its slowest cell and in
    the cell's peers. `per_step_s`: the excess of all messages of a step that take the path one after another, the most
    that a step can lose. `receivers`: ranks to which the path is slow, and which may wait for it.
    """

    kind: PathKind
    units: tuple[str, ...]
    ranks: tuple[int, ...]
    delay_s: float
    peer_s: float
    per_step_s: float
    receivers: tuple[int, ...]

    @property
    def name(self) -> str:
        """The culprit: 'node n3', or 'link n3 - n7'."""
        return f"link {' - '.join(self.units)}" if self.kind == "link" else self.units[0]


@dataclass(frozen=True)
class DelayMatrix:
    """Cells of ranks that send to each other: `sender`, `receiver` [C], their mean `delay_s`, the `peer_s` of cells
    between the same stages, the number of `messages` in a step, and whether the cell is `slow`.
    """

    sender: Integers
    receiver: Integers
    delay_s: Floats
    peer_s: Floats
    messages: Floats
    slow: Booleans
    culprits: tuple[SlowPath, ...]

    def to_json(self) -> dict[str, Any]:
        """Return lists and numbers; an element a cell."""
        cells = {name: value.tolist() for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return cells | {"culprits": [asdict(culprit) for culprit in self.culprits]}


def delay_matrix(events: Columns, places: Places) -> DelayMatrix:
    """Return the delays of the messages in the table `events`. Messages of which one side is missing are left out."""
    sender, receiver, step, delay = _messages(events)
    known = (places.index(sender) >= 0) & (places.index(receiver) >= 0)
    sender, receiver, step, delay = (column[known] for column in (sender, receiver, step, delay))
    order = np.lexsort((step, receiver, sender))
    sender, receiver, step, delay = (column[order] for column in (sender, receiver, step, delay))
    starts = np.flatnonzero(np.append(True, np.diff(sender) + np.diff(receiver) * 1j != 0)) if len(order) else order
    counts = np.diff(np.append(starts, len(order)))
    cells = places.index(sender[starts]), places.index(receiver[starts])
    mean = np.add.reduceat(delay, starts) / counts if len(order) else delay
    steps = max(1, len(np.unique(step)))
    peer_s, deviation, ratio = _compare(cells, mean, _cell_errors(delay, step, mean, counts, steps), places)
    slow = (mean - peer_s > np.maximum(MIN_SCORE * deviation, MIN_EXCESS_S)) & (mean >= ratio * peer_s)
    messages = counts / steps
    matrix = DelayMatrix(sender[starts], receiver[starts], mean, peer_s, messages, slow, ())
    return replace(matrix, culprits=tuple(_culprits(matrix, _Cells.from_places(*cells, places), places)))


def _culprits(matrix: DelayMatrix, cells: _Cells, places: Places) -> Iterator[SlowPath]:
    """Yield the nodes and links that explain the slow cells."""
    for kind, ends, edges in _explain(cells.edges(matrix.slow)):
        mine = matrix.slow & cells.among(edges)
        ranks = np.unique(cells.ranks[mine][np.isin(cells.units[mine], ends)])
        excess = (matrix.delay_s - matrix.peer_s) * matrix.messages
        worst = np.flatnonzero(mine)[np.argmax(excess[mine])]
        stages = places.coords["pp"][cells.ranks[mine]]
        per_step_s = sum(
            float(excess[mine][(stages == direction).all(1)].max()) for direction in np.unique(stages, axis=0)
        )
        yield SlowPath(
            kind, tuple(cells.names[end] for end in dict.fromkeys(ends)), tuple(map(int, places.rank[ranks])),
            float(matrix.delay_s[worst]), float(matrix.peer_s[worst]), per_step_s,
            tuple(map(int, np.unique(matrix.receiver[mine]))),
        )  # fmt: skip


def _messages(events: Columns) -> tuple[Integers, Integers, Integers, Floats]:
    """Return sender, receiver, step and delay in seconds of all messages of which both sides are known."""
    name, peer = np.asarray(events["name"]), np.asarray(events["peer"])
    receives = name == "receive"
    at = np.flatnonzero((peer >= 0) & (receives | (name == "send")))
    receives, rank, peer = receives[at], np.asarray(events["rank"])[at], peer[at]
    sender, receiver = np.where(receives, peer, rank), np.where(receives, rank, peer)
    forward = np.asarray(events["direction"])[at] == "forward"
    keys = [np.asarray(events[key])[at] for key in ("attempt", "step", "stage", "microbatch", "layer")]
    order = np.lexsort((receives, forward, *keys, receiver, sender))
    keys = [column[order] for column in (sender, receiver, forward, *keys)]
    receives, at = receives[order], at[order]
    paired = ~receives[:-1] & receives[1:]
    for column in keys:
        paired &= column[:-1] == column[1:]
    send, receive = at[:-1][paired], at[1:][paired]
    posted = np.maximum(np.asarray(events["start_ns"])[send], np.asarray(events["start_ns"])[receive])
    delay = np.maximum(0, np.asarray(events["end_ns"])[receive] - posted) / 1e9
    return *(np.asarray(column)[:-1][paired] for column in (keys[0], keys[1], keys[4])), delay


def _cell_errors(delay: Floats, step: Integers, mean: Floats, counts: Integers, steps: int) -> Floats:
    """Return the standard error of each cell's mean, of delays in order of cells and steps. The messages of a step
    depend on each other: a step counts once.
    """
    cell = np.repeat(np.arange(len(counts)), counts)
    number = np.cumsum(np.append(0, np.diff(cell) + np.abs(np.diff(step)) != 0)) if len(cell) else cell
    of_step = np.bincount(number, delay) / np.bincount(number)
    cell = cell[np.searchsorted(number, np.arange(len(of_step)))]
    return np.asarray(np.sqrt(np.bincount(cell, (of_step - mean[cell]) ** 2, len(counts))) / steps)


def _compare(
    cells: tuple[Integers, Integers], delay: Floats, error: Floats, places: Places
) -> tuple[Floats, Floats, Floats]:
    """Return the median delay of each cell's peers; the deviation: among the peers, or the `error` of the cell's mean
    and of the peers', where that is larger; and the smallest ratio to the peers of a slow cell.
    """
    stage, here = places.coords["pp"], places.node[cells[0]] == places.node[cells[1]]
    role = (stage[cells[0]] * (int(stage.max(initial=0)) + 1) + stage[cells[1]]) * 2 + here
    peer_s, deviation, ratio = np.empty_like(delay), np.empty_like(delay), np.empty_like(delay)
    for code in np.unique(role):
        mine = role == code
        peer_s[mine] = median = lower_median(delay[mine])
        spread = MAD_TO_DEVIATION * lower_median(np.abs(delay[mine] - median))
        errors = np.hypot(error[mine], lower_median(error[mine]))
        deviation[mine] = np.maximum(errors, max(float(spread), NOISE_FLOOR * float(median)))
        ratio[mine] = MIN_RATIO if mine.sum() >= FEW_CELLS else MIN_RATIO_OF_FEW
    return peer_s, deviation, ratio


class _Cells(NamedTuple):
    """Cells with the positions of `ranks` [C, 2] and of `units` [C, 2], nodes or ranks with their `names`."""

    ranks: Integers
    units: Integers
    names: list[str]

    @classmethod
    def from_places(cls, sender: Integers, receiver: Integers, places: Places) -> _Cells:
        ranks, several = np.stack([sender, receiver], 1), len(places.nodes) > 1
        names = [f"node {node}" for node in places.nodes] if several else [f"rank {rank}" for rank in places.rank]
        return cls(ranks, places.node[ranks] if several else ranks, names)

    def edges(self, slow: Booleans) -> dict[Edge, bool]:
        """Return the pairs of units, and whether most cells of the pair are slow."""
        pairs, cell = np.unique(self.units, axis=0, return_inverse=True)
        share = np.bincount(cell.reshape(-1), slow, len(pairs)) / np.bincount(cell.reshape(-1), minlength=len(pairs))
        return {(int(a), int(b)): bool(part > 0.5) for (a, b), part in zip(pairs, share, strict=True)}

    def among(self, edges: set[Edge]) -> Booleans:
        """Return which cells belong to some pairs of units."""
        return np.array([(int(a), int(b)) in edges for a, b in self.units], bool)


def _explain(edges: Mapping[Edge, bool]) -> Iterator[tuple[PathKind, Edge, set[Edge]]]:
    """Yield the units all of whose edges to or from several others are slow, then the links of the remaining slow
    edges; with the kind, the unit or both ends, and the edges.
    """
    slow = {edge for edge, is_slow in edges.items() if is_slow}
    rest = set(slow)
    for unit, _ in Counter(end for edge in slow for end in edge).most_common():
        sides = [side for side in (0, 1) if _all_slow(edges, unit, side)]
        chosen = {edge for edge in slow if any(edge[side] == unit for side in sides)}
        if chosen & rest:
            yield "node" if len(sides) == 2 else ("send", "receive")[sides[0]], (unit, unit), chosen
            rest -= chosen
    for ends in sorted({(min(edge), max(edge)) for edge in rest}):
        yield "link", ends, rest & {ends, ends[::-1]}


def _all_slow(edges: Mapping[Edge, bool], unit: int, side: int) -> bool:
    mine = [is_slow for edge, is_slow in edges.items() if edge[side] == unit]
    return len(mine) > 1 and all(mine)
