"""The search for bad nodes and links by pairs of nodes: which pairs to measure next, given the pairs that were slow.

1. Neighbours: n / 2 pairs at once. A fast pair clears both of its nodes.
2. The nodes of slow pairs, with partners that are cleared: a node that is slow with both partners is suspected, and a
   slow pair of two cleared nodes is a suspected link.
3. Suspects once more: nodes with a third partner, links as they are.

With `all_links` blocks of cleared nodes then merge, two by two, as in a merge sort: a round measures every pair of the
two halves of every block, in steps of disjoint pairs, and log2(n) rounds have measured all links; slow links are
measured once more. Nobody is named for one measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass

Pair = tuple[str, str]


@dataclass(frozen=True)
class Round:
    """Pairs to measure. Pairs of a step are disjoint and measured at the same time, steps one after the other.

    `level`: rates are comparable within a level: 0 for neighbours, then the logarithm of a block's half.
    """

    steps: tuple[tuple[Pair, ...], ...]
    level: int = 0

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return tuple(pair for step in self.steps for pair in step)


@dataclass(frozen=True)
class Culprits:
    """Bad nodes, bad links between other nodes, and slow pairs for which no cleared node was left to decide.
    Each explains pairs that are slow, or that have no connection.
    """

    nodes: tuple[str, ...] = ()
    links: tuple[Pair, ...] = ()
    undecided: tuple[Pair, ...] = ()


def explain_broken(nodes: Iterable[str], broken: Iterable[tuple[str, str]]) -> Culprits:
    """Name the fewest nodes and links that explain broken pairs; a pair is broken if one direction is.

    A node without a path to more than half of the others, and to at least two, is named itself; a pair between two
    other nodes is a link.
    """
    count = len(set(nodes))
    left = {(min(pair), max(pair)) for pair in broken}
    named: list[str] = []
    while left:
        lost: dict[str, int] = {}
        for pair in left:
            for node in pair:
                lost[node] = lost.get(node, 0) + 1
        worst = max(sorted(lost), key=lambda node: lost[node])
        others = count - 1 - len(named)
        if lost[worst] < 2 or 2 * lost[worst] <= others:
            break
        named.append(worst)
        left = {pair for pair in left if worst not in pair}
    return Culprits(tuple(sorted(named)), tuple(sorted(left)))


Search = Generator[Round, Collection[Pair], Culprits]
"""Yields rounds; is sent the slow pairs of the round; returns the culprits."""


def search_pairs(nodes: Sequence[str], *, all_links: bool = False) -> Search:
    """Search among `nodes`, in the order of their places in the network."""
    if len(nodes) < 2:
        return Culprits()
    found = yield from _search_neighbours(nodes)
    if not all_links:
        return found
    rest = [node for node in nodes if node not in found.nodes]
    links = yield from _search_blocks(rest)
    broken = explain_broken(rest, [*found.links, *links])
    bad = tuple(node for node in nodes if node in {*found.nodes, *broken.nodes})
    return Culprits(bad, broken.links, found.undecided)


def _search_neighbours(nodes: Sequence[str]) -> Search:
    first = tuple((nodes[index], nodes[index + 1]) for index in range(0, len(nodes) - 1, 2))
    odd = ((nodes[0], nodes[-1]), (nodes[-2], nodes[-1])) if len(nodes) % 2 else ()  # of three nodes: all pairs
    slow = set((yield Round(_steps([*first, *odd]))))
    cleared = [node for pair in (*first, *odd) if pair not in slow for node in pair]
    cleared = list(dict.fromkeys(cleared))
    suspects = [node for node in nodes if node not in cleared]
    if not suspects:
        return Culprits()
    if not cleared:
        return Culprits(undecided=tuple(sorted(slow)))
    tried = _with_partners(suspects, cleared, 0)
    slow_again = set((yield Round(_steps(tried))))
    nodes_in_doubt = [suspect for suspect, pair in zip(suspects, tried, strict=True) if pair in slow_again]
    links_in_doubt = [pair for pair in slow if not set(nodes_in_doubt) & set(pair)]
    links_in_doubt += [pair for pair in slow_again if not set(nodes_in_doubt) & set(pair)]
    third = _with_partners(nodes_in_doubt, cleared, 1)
    if not third and not links_in_doubt:
        return Culprits()
    still_slow = set((yield Round(_steps([*third, *links_in_doubt]))))
    bad = tuple(node for node, pair in zip(nodes_in_doubt, third, strict=True) if pair in still_slow)
    return Culprits(bad, tuple(sorted(pair for pair in links_in_doubt if pair in still_slow)))


def _search_blocks(nodes: Sequence[str]) -> Generator[Round, Collection[Pair], list[Pair]]:
    """Return the links that are slow twice, beyond those of neighbours."""
    in_doubt: list[Pair] = []
    half, level = 1, 0
    while half < len(nodes):
        pairs = _block_pairs(nodes, half)
        in_doubt += (yield Round(_steps(pairs), level)) if level else ()
        half, level = 2 * half, level + 1
    if not in_doubt:
        return []
    return sorted((yield Round(_steps(sorted(in_doubt)))))


def _block_pairs(nodes: Sequence[str], half: int) -> list[Pair]:
    """Return the pairs between the two halves of every block of 2 x `half` nodes, in an order of disjoint steps."""
    pairs = []
    for shift in range(half):
        for start in range(0, len(nodes), 2 * half):
            left, right = nodes[start : start + half], nodes[start + half : start + 2 * half]
            for index, node in enumerate(left):
                place = (index + shift) % half
                if place < len(right):
                    pairs.append((node, right[place]))
    return pairs


def _with_partners(suspects: Sequence[str], cleared: Sequence[str], turn: int) -> list[Pair]:
    """Pair every suspect with a cleared node; another one in another turn, if there is another."""
    return [(cleared[(index + turn) % len(cleared)], suspect) for index, suspect in enumerate(suspects)]


def _steps(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """Distribute pairs to steps of disjoint pairs, each pair to the first step that has room."""
    steps: list[list[Pair]] = []
    busy: list[set[str]] = []
    for pair in pairs:
        index = next((number for number, nodes in enumerate(busy) if not nodes & set(pair)), len(steps))
        if index == len(steps):
            steps.append([])
            busy.append(set())
        steps[index].append(pair)
        busy[index].update(pair)
    return tuple(tuple(step) for step in steps)
