"""The rounds of a search by pairs, carried out on the nodes: rates of pairs, and which of them are slow."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping

from megascale.catalog.checks import CHECKS
from megascale.core.units import format_bytes
from megascale.operate.health.compare import compare_links
from megascale.operate.health.node_runs import NodeRuns
from megascale.operate.health.pair_search import Culprits, Pair, Round, search_pairs


class PairRounds:
    """Searches by the check `name` among the nodes of `endpoints`, addresses by node."""

    def __init__(self, name: str, nodes: NodeRuns, endpoints: Mapping[str, str], tolerance: float) -> None:
        self._name = name
        self._nodes = nodes
        self._endpoints = endpoints
        self._facts = CHECKS[name].facts
        self._tolerance = tolerance
        self._rates: dict[Pair, float] = {}
        self._levels: dict[Pair, int] = {}
        self._slow: set[Pair] = set()
        self._errors: dict[Pair, str] = {}

    async def search(self, *, all_links: bool) -> Culprits:
        """Measure rounds of pairs until the search has its culprits."""
        search = search_pairs(list(self._endpoints), all_links=all_links)
        slow: set[Pair] | None = None
        while True:
            try:
                pairs = next(search) if slow is None else search.send(slow)
            except StopIteration as end:
                culprits: Culprits = end.value
                return culprits
            slow = self._slow_pairs(pairs, await self._measure(pairs))

    def _slow_pairs(self, pairs: Round, rates: Mapping[Pair, float]) -> set[Pair]:
        """Return the pairs of a round that are slow beside all pairs of their level."""
        for pair in pairs.pairs:
            self._levels.setdefault(pair, pairs.level)
        known = self._rates | dict(rates)
        slow = set[Pair]()
        for level in {self._levels[pair] for pair in pairs.pairs}:
            same = {pair: rate for pair, rate in known.items() if self._levels[pair] == level}
            compared = compare_links(same, self._facts["noise"], self._tolerance)
            slow |= {pair for pair in pairs.pairs if pair in compared and compared[pair].low}
        self._rates |= rates
        self._slow |= slow
        return slow

    async def _measure(self, pairs: Round) -> dict[Pair, float]:
        if self._facts["runs_on"] == "group":
            return await self._measure_groups(pairs)
        peers: dict[str, dict[str, str]] = {}
        for node, peer in pairs.pairs:
            peers.setdefault(node, {})[peer] = self._endpoints[peer]
        given = {node: {"own": self._endpoints[node], "peers": some} for node, some in peers.items()}
        results = await self._nodes.run_on(peers, self._name, given)
        for node, result in results.items():
            lost = dict.fromkeys(peers[node], result.problem) if result.problem else result.details["errors"]
            self._errors |= {(node, peer): error for peer, error in lost.items()}
        return {
            (node, peer): float(results[node].details.get("rates", {}).get(peer, 0.0)) for node, peer in pairs.pairs
        }

    async def _measure_groups(self, pairs: Round) -> dict[Pair, float]:
        """Run the check with the ranks of both nodes of every pair, step by step."""
        rates: dict[Pair, float] = {}
        for step in pairs.steps:
            calls = [self._nodes.run_as_group(pair, self._name, self._endpoints[pair[0]]) for pair in step]
            answers = await asyncio.gather(*calls) if self._nodes.at_once else [await call for call in calls]
            for pair, results in zip(step, answers, strict=True):
                problems = [result.problem for result in results if result.problem]
                if problems:
                    self._errors[pair] = problems[0]
                values = [result.value for result in results if result.value is not None]
                rates[pair] = 0.0 if problems else min(values)
        return rates

    def reference(self) -> float | None:
        """Median rate of all pairs."""
        return statistics.median(self._rates.values()) if self._rates else None

    def best_rate(self, node: str) -> float | None:
        """Rate of the node's best pair."""
        return max((rate for pair, rate in self._rates.items() if node in pair), default=None)

    def slow_partners(self, node: str) -> list[str]:
        """Names of the nodes with which `node` was slow."""
        return sorted({other for pair in self._slow if node in pair for other in pair if other != node})

    def describe(self, pair: Pair) -> str:
        """Say how slow a pair is."""
        pair = pair if pair in self._rates else (pair[1], pair[0])
        if error := self._errors.get(pair):
            return error
        reference = self.reference() or 0.0
        return f"{format_bytes(self._rates[pair])}/s, the median pair has {format_bytes(reference)}/s"
