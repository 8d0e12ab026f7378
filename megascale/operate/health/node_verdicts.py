"""Verdicts on nodes from the results of their checks: pure, the same for the driver, the doctor and a simulation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megascale.catalog.checks import CHECKS
from megascale.core.units import format_bytes, format_flops
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.compare import TOLERANCE, compare_digests, compare_high, compare_same

Kind = Literal["ok", "failed", "low", "differs", "undecided", "skipped", "alone"]
"""Verdicts on a check:

- ok; skipped: the check does not apply; alone: no other node to compare with
- failed: by itself, such as a wrong result; low, differs: beside the other nodes
- undecided: nodes differ, and no majority says which are wrong
"""

BAD = frozenset[str](["failed", "low", "differs"])


@dataclass(frozen=True)
class NodeVerdict:
    """The verdict on a check of a node. `reference`: value of the other nodes; `reason`: a clause for people."""

    node: str
    check: str
    kind: Kind
    unit: str = ""
    value: float | None = None
    reference: float | None = None
    reason: str = ""
    duration_s: float = 0.0

    @property
    def bad(self) -> bool:
        return self.kind in BAD

    def with_unit(self, value: float | None) -> str:
        """Format a value of the check."""
        if value is None:
            return "-"
        if self.unit == "byte/s":
            return f"{format_bytes(value)}/s"
        if self.unit == "FLOP/s":
            return format_flops(value)
        return f"{value * 1e3:.2f} ms" if self.unit == "s" else f"{value:g}"


def judge(
    results: Mapping[str, Sequence[CheckResult]], tolerance: float = TOLERANCE, of: Collection[str] | None = None
) -> list[NodeVerdict]:
    """Judge every check of every node, or of the nodes `of`, given the results of single checks by node."""
    names = list(dict.fromkeys(result.name for some in results.values() for result in some))
    verdicts = []
    for name in names:
        by_node = {node: one for node, some in results.items() for one in some if one.name == name}
        verdicts += judge_check(name, by_node, tolerance, of)
    return verdicts


def judge_check(
    name: str, results: Mapping[str, CheckResult], tolerance: float = TOLERANCE, of: Collection[str] | None = None
) -> list[NodeVerdict]:
    """Judge one check of all nodes, or of the nodes `of`."""
    usable = {node: result for node, result in results.items() if not (result.problem or result.skipped)}
    compared: dict[str, Compared] = {}
    for platform in dict.fromkeys(result.platform for result in usable.values()):
        same = {node: result for node, result in usable.items() if result.platform == platform}
        if len(same) > 1:  # of the same hardware and software
            compared |= _compare(name, same, tolerance)
    verdicts = []
    for node in results if of is None else [node for node in of if node in results]:
        result = results[node]
        kind, reference, reason = compared.get(node, ("alone", None, ""))
        if result.problem:
            kind, reason = "failed", result.problem
        elif result.skipped:
            kind, reason = "skipped", result.skipped
        elif CHECKS[name].facts["better"] == "zero":
            kind, reason = ("failed", "not zero") if result.value else ("ok", "")
        verdicts.append(NodeVerdict(node, name, kind, result.unit, result.value, reference, reason, result.duration_s))
    return verdicts


Compared = tuple[Kind, float | None, str]

DIGESTS = {
    "ok": "",
    "differs": "its result is not the other nodes', to the bit",
    "undecided": "nodes differ to the bit, without a majority: repeat it with a third node",
}


def _compare(name: str, results: Mapping[str, CheckResult], tolerance: float) -> dict[str, Compared]:
    facts = CHECKS[name].facts
    values = {node: result.value for node, result in results.items() if result.value is not None}
    if facts["better"] == "digest":
        kinds = compare_digests({node: result.digest for node, result in results.items()})
        return {node: (kind, None, DIGESTS[kind]) for node, kind in kinds.items()}
    if facts["better"] == "same":
        return {
            node: ("differs" if one.low else "ok", one.reference, f"{one.value - one.reference:+.3g} from the median")
            for node, one in compare_same(values, facts["floor"]).items()
        }
    if facts["better"] == "higher":
        return {
            node: ("low" if one.low else "ok", one.reference, f"{one.ratio:.0%} of the other nodes' median")
            for node, one in compare_high(values, facts["noise"], tolerance).items()
        }
    return {}
