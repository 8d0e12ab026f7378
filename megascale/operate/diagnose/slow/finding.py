"""Results of the analyses of a slow run: suspects with their possible cost, and findings; each names its culprit.

- `SlowCulprit`: a rank, node, link, group, stage, expert, or the whole job
- `SlowCause`: a suspect, and the seconds by which the model says that it makes steps longer
- `Finding`: a cause of high cost
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from megascale.core.rank import format_ranks
from megascale.operate.diagnose.slow.step_cube import Floats, Integers

FindingKind = Literal[
    "pause", "compute", "data", "host", "gc", "link", "communication", "job", "drift", "steps", "experts"
]

CulpritKind = Literal["ranks", "node", "link", "stage", "group", "expert", "job"]

WORDS: dict[FindingKind, str] = {
    "pause": "stands still now and then", "compute": "computes slowly", "data": "waits for data",
    "host": "loses time on the host",
    "gc": "garbage collection pauses it", "link": "messages are slow", "communication": "collectives are slow",
    "job": "the whole job became slower", "drift": "ranks wait longer for each other", "steps": "single steps are slow",
    "experts": "takes more tokens than its share",
}  # fmt: skip


@dataclass(frozen=True)
class SlowCulprit:
    """The slow part of a job. `ranks`: ascending; none for the job. `nodes`: the node, or both ends of a link between
    nodes; none for a link between `ranks`. `stage`: of a stage. `axis`, `groups`: of groups, and their number. `layer`,
    `expert`: of an expert.
    """

    kind: CulpritKind
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    stage: int = -1
    axis: str = ""
    groups: int = 0
    layer: int = -1
    expert: int = -1

    @classmethod
    def of_ranks(cls, ranks: Sequence[int] | Integers, node: str = "") -> Self:
        """Return some ranks, or the `node` that they are on."""
        return cls("node" if node else "ranks", tuple(map(int, ranks)), (node,) if node else ())

    def __str__(self) -> str:
        match self.kind:
            case "ranks":
                return format_ranks(self.ranks)
            case "node":
                return f"node {self.nodes[0]}"
            case "link":
                ends = [f"node {node}" for node in self.nodes] or [f"rank {rank}" for rank in self.ranks]
                return f"link {' - '.join(ends)}"
            case "stage":
                return f"stage {self.stage}"
            case "group":
                groups = f"{self.axis} group" if self.groups == 1 else f"{self.groups} {self.axis} groups"
                return f"{groups} of {format_ranks(self.ranks)}"
            case "expert":
                return f"layer {self.layer} expert {self.expert}"
        return "all ranks"


JOB = SlowCulprit("job")


@dataclass(frozen=True)
class SlowCause:
    """A possible cause, and by how many `seconds` [S] the model says that it makes each step of a cube longer. `seen`:
    numbers of the stretches in which it shows.
    """

    kind: FindingKind
    culprit: SlowCulprit
    seconds: Floats
    seen: frozenset[int]
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """A cause of lost time. `since`, `until`: steps; `until` is None if it goes on. `cost_s`: seconds that a step lost
    in the mean, and their share of the step; 0 if the cost is unknown.
    """

    kind: FindingKind
    culprit: SlowCulprit
    since: int
    until: int | None
    cost_s: float
    cost_share: float
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        goes_on = self.until is None
        span = f"since step {self.since}" if goes_on else f"steps {self.since} to {self.until}, over"
        costs = f"; cost{'s' if goes_on else ''} {self.cost_s:.3g} s a step ({self.cost_share:.1%})"
        return f"{self.culprit}: {WORDS[self.kind]}, {span}{costs if self.cost_s else ''}"

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the summary."""
        who = {"kind": self.kind, "culprit": str(self.culprit), "ranks": self.culprit.ranks}
        return who | {name: value for name, value in asdict(self).items() if name not in who} | {"summary": str(self)}
