"""The search by pairs, on simulated networks: bad nodes and links are named, within a logarithm of rounds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection

import pytest

from megascale.operate.health.pair_search import Culprits, Pair, Round, search_pairs


def names(count: int) -> list[str]:
    return [f"n{index:04}" for index in range(count)]


def play(nodes: list[str], slow: Callable[[Pair], bool], all_links: bool = False) -> tuple[Culprits, list[Round]]:
    """Search a network in which `slow` says whether a pair is slow; return the culprits and the rounds."""
    search, rounds = search_pairs(nodes, all_links=all_links), []
    answer: Collection[Pair] | None = None
    while True:
        try:
            rounds.append(search.send(answer))  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value, rounds
        for step in rounds[-1].steps:
            busy = [node for pair in step for node in pair]
            assert len(set(busy)) == len(busy)  # nobody is measured twice at a time
        answer = [pair for pair in rounds[-1].pairs if slow(pair)]


def test_two_bad_nodes_of_16_are_named_in_at_most_5_rounds() -> None:
    nodes = names(16)
    for bad in itertools.combinations(nodes, 2):
        culprits, rounds = play(nodes, lambda pair, bad=bad: bool(set(pair) & set(bad)))
        assert culprits == Culprits(bad)
        assert len(rounds) <= 5


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_a_bad_node_of_few_is_named(count: int) -> None:
    for bad in names(count):
        assert play(names(count), lambda pair, bad=bad: bad in pair)[0] == Culprits((bad,))


@pytest.mark.parametrize("count", [2, 3, 5, 8, 16, 100, 1536])
def test_healthy_nodes_take_one_round(count: int) -> None:
    culprits, rounds = play(names(count), lambda pair: False)
    assert (culprits, len(rounds)) == (Culprits(), 1)
    assert {node for pair in rounds[0].pairs for node in pair} == set(names(count))


@pytest.mark.parametrize("count", [3, 4, 7, 16, 31])
def test_all_links_are_measured_in_a_logarithm_of_rounds(count: int) -> None:
    culprits, rounds = play(names(count), lambda pair: False, all_links=True)
    assert culprits == Culprits()
    measured = [frozenset(pair) for one in rounds for pair in one.pairs]
    assert set(measured) == {frozenset(pair) for pair in itertools.combinations(names(count), 2)}
    assert len(rounds) == math.ceil(math.log2(count))


@pytest.mark.parametrize("count", [4, 7, 16])
def test_any_bad_link_is_named(count: int) -> None:
    nodes = names(count)
    for link in itertools.combinations(nodes, 2):
        culprits, rounds = play(nodes, lambda pair, link=link: set(pair) == set(link), all_links=True)
        assert culprits == Culprits(links=(link,))
        assert len(rounds) <= math.ceil(math.log2(count)) + 3


def test_a_node_and_a_link_are_told_apart() -> None:
    nodes, link = names(16), ("n0004", "n0011")
    culprits, _ = play(nodes, lambda pair: "n0007" in pair or set(pair) == set(link), all_links=True)
    assert culprits == Culprits(("n0007",), (link,))


def test_one_slow_measurement_names_nobody() -> None:
    random.seed(0)
    for number in range(200):
        seen: set[frozenset[str]] = set()

        def once(pair: Pair, seen: set[frozenset[str]] = seen, hit: int = number % 8) -> bool:
            seen.add(frozenset(pair))
            return len(seen) == hit + 1  # the first measurement of one pair

        culprits, _ = play(names(16), once, all_links=True)
        assert culprits == Culprits()


def test_two_nodes_that_are_slow_have_no_culprit() -> None:
    culprits, _ = play(names(2), lambda pair: True)
    assert culprits == Culprits(undecided=(("n0000", "n0001"),))
