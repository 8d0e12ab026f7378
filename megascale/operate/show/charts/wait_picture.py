"""A picture of a hang: boxes of ranks that wait in the same place, arrows to those they wait for, the culprit in red.

A column is one link of the chain to the culprit, which stands on the right. Where there are many places, those of the
same column and group are one box, so that a job of any size has a picture of a few boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megascale.core.rank import format_ranks
from megascale.operate.diagnose.hang.wait_chain import WaitingSet
from megascale.operate.show.charts.shapes import BLUE, GREY, RED, STYLE, document, line, rect, text
from megascale.operate.show.diagnosis import RunDiagnosis

MOST_PLACES = 20  # most places with a box each
MOST_COLUMNS = 8  # most columns of boxes that wait; what is farther from the culprit stands in the first
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN, TOP = 270, 54, 60, 16, 12, 44  # pixels
MOST_LETTERS = 46  # most letters of a line in a box
FEW = 5  # most ranks that a box names

_HEAD = (
    f"<style>{STYLE}</style><defs><marker id='arrow' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='8' "
    f"markerHeight='8' orient='auto'><path d='M0 0L8 4L0 8z' fill='{GREY}'/></marker></defs>"
)


@dataclass
class _Box:
    """Ranks that wait, `links` from a culprit, 0 if none leads there; the culprits themselves have no `sets`."""

    links: int
    sets: list[WaitingSet] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for each in self.sets for rank in each.ranks)

    def lines(self) -> tuple[str, str, str]:
        """Return who waits, where, and for whom."""
        first, ranks = self.sets[0], self.ranks
        verb = "wait" if len(ranks) > 1 else "waits"
        awaited = sorted({rank for each in self.sets for rank in each.awaited})
        for_whom = f"for {format_ranks(awaited, FEW)}" if awaited else "the data are missing" if first.group else ""
        if any(each.mixed for each in self.sets):
            for_whom = "members made different calls"
        if len(self.sets) > 1:
            where, group = f"{verb} in {len(self.sets):,} places", f"group {_role(first)}"
        else:
            what, _, name = first.what.partition(" of group ")
            where, group = f"{verb} {what}", f"group {name}" if name else ""
        return format_ranks(ranks, FEW), where, ", ".join(filter(None, (group, for_whom)))


def wait_picture(found: RunDiagnosis) -> str:
    """Draw the waits of a diagnosis as SVG; of a run that does not hang, only its title."""
    if found.verdict is None:
        return document(640, 40, f"{found.view.name}: the run {found.condition}", [_HEAD])
    boxes, culprit = _boxes(found), _Box(0)
    columns = _columns([*boxes, culprit])
    most = max(len(column) for column in columns)
    for index, column in enumerate(columns):
        for row, box in enumerate(column):
            box.x = MARGIN + index * (BOX_WIDTH + GAP_X)
            box.y = TOP + (row + (most - len(column)) / 2) * (BOX_HEIGHT + GAP_Y)
    shapes = [_arrow(box, other) for box, other in _waits(boxes, culprit, found.verdict.ranks)]
    for box in boxes:
        lines = box.lines()
        shapes += _draw(box, BLUE if box.links else GREY, lines, "; ".join(filter(None, lines)))
    verdict, nodes = found.verdict, found.states.nodes(found.verdict.ranks)
    who = format_ranks(verdict.ranks, FEW) if verdict.ranks else "no rank is known to be at fault"
    where = f" on {', '.join(nodes[:2])}{f' and {len(nodes) - 2} more' if len(nodes) > 2 else ''}" if nodes else ""
    state = found.culprits[0].state if found.culprits else None
    phase = f"phase {state.phase}, step {state.step}" if state else "no flight record"
    sure = verdict.kind if verdict.confident else f"{verdict.kind}, not certain"
    shapes += _draw(culprit, RED, (who + where, sure, phase), "; ".join(verdict.evidence))
    title = f"{found.view.name}: {found.what}"
    width = max(2 * MARGIN + len(columns) * (BOX_WIDTH + GAP_X) - GAP_X, 7 * len(title))
    return document(width, TOP + most * (BOX_HEIGHT + GAP_Y) + MARGIN, title, [_HEAD, *shapes])


def _boxes(found: RunDiagnosis) -> list[_Box]:
    boxes: dict[object, _Box] = {}
    for links, each in zip(found.links, found.waiting, strict=True):
        column = min(links, MOST_COLUMNS)
        key = (column, _role(each), each.awaited == ()) if len(found.waiting) > MOST_PLACES else each
        boxes.setdefault(key, _Box(column)).sets.append(each)
    return list(boxes.values())


def _role(each: WaitingSet) -> str:
    """Return the name of a wait's group without the peer: 'pp.down receive'."""
    return " ".join(each.group.split()[:2]) if each.group else each.what


def _columns(boxes: Sequence[_Box]) -> list[list[_Box]]:
    """Return the boxes by column: without a chain, the farthest, ..., the nearest, the culprit, which is the last."""
    *waiting, culprit = boxes
    by_links: defaultdict[int, list[_Box]] = defaultdict(list)
    for box in waiting:
        by_links[box.links].append(box)
    order = [0, *sorted(by_links.keys() - {0}, reverse=True)]
    columns = [sorted(by_links[links], key=lambda box: -len(box.ranks)) for links in order if by_links[links]]
    return [*columns, [culprit]]


def _waits(boxes: Sequence[_Box], culprit: _Box, culprits: Sequence[int]) -> Iterator[tuple[_Box, _Box]]:
    """Yield each pair of boxes of which the first waits for the second."""
    box_of = {rank: box for box in boxes for each in box.sets for rank in each.ranks}
    named = set(culprits)
    for box in boxes:
        awaited = {rank for each in box.sets for rank in each.awaited}
        targets = {id(box_of[rank]): box_of[rank] for rank in awaited - named if rank in box_of}
        yield from ((box, other) for other in targets.values() if other is not box)
        if awaited & named:
            yield box, culprit
    for other in {id(box_of[rank]): box_of[rank] for rank in culprits if rank in box_of}.values():
        yield culprit, other


def _arrow(box: _Box, other: _Box) -> str:
    """Draw an arrow to the right, or back below the boxes to one that is not on the right."""
    if other.x > box.x:
        x, y = box.x + BOX_WIDTH, box.y + BOX_HEIGHT / 2
        dx, dy = other.x - x, other.y + BOX_HEIGHT / 2 - y
        path = f"c{dx / 2:.1f} 0 {dx / 2:.1f} {dy:.1f} {dx:.1f} {dy:.1f}"
    else:
        x, y = box.x + BOX_WIDTH / 2, box.y + BOX_HEIGHT
        dx, dy = other.x + BOX_WIDTH / 2 - x, other.y + BOX_HEIGHT - y
        path = f"c0 30 {dx:.1f} 30 {dx:.1f} {dy:.1f}"
    return line(x, y, path, GREY, " stroke-width='1.5' marker-end='url(#arrow)'")


def _draw(box: _Box, colour: str, lines: Sequence[str], note: str) -> Iterator[str]:
    edge = rect(box.x, box.y, BOX_WIDTH, BOX_HEIGHT, colour)
    yield edge + rect(box.x + 2, box.y + 2, BOX_WIDTH - 4, BOX_HEIGHT - 4, "white", note)
    for row, words in enumerate(lines):
        cut = words if len(words) <= MOST_LETTERS else f"{words[: MOST_LETTERS - 3]}..."
        yield text(box.x + 8, box.y + 16 + 15 * row, cut, "" if row else "title")
