"""Classification of faults: ends of ranks, lost nodes and verdicts about hangs, as class, culprit and evidence.

The first cause is reported once. A rank that only lost a peer, or that another rank's failure aborted, is a follower;
so is every rank that the driver stopped itself. No failure of a rank sends SIGKILL or SIGSTOP: a rank that was killed
or stopped from outside is a culprit beside the first.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megascale.core.errors import Exit
from megascale.core.rank import format_ranks
from megascale.core.units import format_duration
from megascale.operate.channel.messages import RankEnd
from megascale.operate.driver.incidents import Culprit, IncidentClass
from megascale.operate.driver.roster import format_nodes
from megascale.operate.node.rank_ends import how_ended
from megascale.record.rank_state import SILENT_S, RankState

if TYPE_CHECKING:
    from megascale.operate.diagnose.hang.hang import Verdict

CODE_ERRORS = frozenset({
    "ArithmeticError", "AssertionError", "AttributeError", "ImportError", "IndexError", "KeyError", "LookupError",
    "ModuleNotFoundError", "NameError", "NotImplementedError", "RecursionError", "SyntaxError", "TypeError",
    "UnboundLocalError", "UnicodeDecodeError", "ZeroDivisionError",
})  # fmt: skip
"""Errors of code, which occur on every node: ByteRobust rolls the code back for them, and evicts no node."""

MEMORY_PATTERNS = frozenset({"linux_oom_kill", "host_oom", "cuda_oom"})
NODE_PATTERNS = frozenset({"gpu_hardware_fault", "gpu_lost", "gpu_ecc", "disk_failure"})
STORAGE_PATTERNS = frozenset({"disk_full", "storage_error", "io_error", "bus_error"})
CASCADE_PATTERNS = frozenset({"nccl_cascade", "nccl_watchdog", "collective_timeout", "peer_lost"})
"""Names of `health.observations`: they say what the output shows, never who is to blame."""

_PERMANENT: Mapping[int | None, tuple[IncidentClass, str]] = {
    Exit.DO_NOT_REQUEUE: ("divergence", "see the steps before in metrics.jsonl; resume from a checkpoint"),
    Exit.DATA: ("data", "fix the data, then launch the job once more"),
    Exit.CONFIG: ("software", "fix the configuration, then launch the job once more"),
}
"""Exit statuses of errors that a restart would meet again: the class, and what to do."""


@dataclass(frozen=True)
class Finding:
    """A fault before its verdict. `since`: its time in Unix seconds; `permanent`: a restart would fail in the same way;
    `memory`: memory ran out; `group_ranks`: ranks of the culprit's group. `end`: of the first culprit, or of the first
    rank that lost another, None for a fault in which no rank ended.
    """

    class_: IncidentClass
    what: str
    culprit: Culprit
    since: float
    signature: str
    evidence: tuple[str, ...] = ()
    hint: str = ""
    followers: tuple[int, ...] = ()
    permanent: bool = False
    memory: bool = False
    end: RankEnd | None = None

    @property
    def status(self) -> int:
        """The exit status of a job that this fault ends: the first culprit's own, if it has one."""
        if self.end is None:
            return Exit.UNCLASSIFIED
        own = self.end.exit_status if self.end.error else self.end.status
        return max(own or 0, 0) or Exit.UNCLASSIFIED


def is_cascade(end: RankEnd) -> bool:
    """Return True for the end of a rank as a consequence of another end."""
    aborted = end.status == -signal.SIGABRT and not CASCADE_PATTERNS.isdisjoint(end.patterns)
    return end.stopped or end.peer_lost or aborted


def is_killed(end: RankEnd) -> bool:
    """Return True for the end of a rank by SIGKILL, which is the consequence of no other rank's end."""
    return end.status == -signal.SIGKILL and not end.stopped


def classify_ends(ends: Mapping[int, RankEnd], node_of: Mapping[int, str]) -> Finding:
    """Return the finding about the ends of ranks, none of them on a lost node. `node_of`: node by rank."""
    failed = [end for end in ends.values() if not end.in_order]
    causes = sorted((end for end in failed if not is_cascade(end)), key=lambda end: (end.time, end.rank))
    if not causes:
        return _classify_lost_peers([end for end in failed if not end.stopped], node_of)
    first = causes[0]
    same = tuple(sorted(end.rank for end in causes if (end.error, end.status) == (first.error, first.status)))
    ranks = first.named or (same if first.error or is_killed(first) else (first.rank,))
    culprit = Culprit(ranks, _nodes(ranks, node_of))
    followers = tuple(sorted({end.rank for end in failed}.difference(ranks)))
    return replace(_classify_end(first, culprit, followers), end=ends[same[0]] if first.error else first)


def add_culprits(finding: Finding, others: Mapping[int, str], node_of: Mapping[int, str]) -> Finding:
    """Return a finding with further ranks that have not failed as a consequence. `others`: what each does, by rank.

    The nodes of a lost node's incident stay the lost ones, which are to be replaced. A stopped rank answers no peer:
    with one, a network that seems to be partial is no finding.
    """
    by_words: dict[str, list[int]] = {}
    for rank, words in sorted(others.items()):
        if rank not in finding.culprit.ranks:
            by_words.setdefault(words, []).append(rank)
    if not by_words:
        return finding
    clauses = [
        f"{Culprit(tuple(more), _nodes(more, node_of))} {_conjugate(words, more)}" for words, more in by_words.items()
    ]
    ranks = tuple(sorted({*finding.culprit.ranks, *others}))
    if finding.class_ == "network":
        finding = replace(
            finding, class_="hang", what=clauses.pop(0), signature=f"hang: stopped of {format_ranks(ranks)}", hint=""
        )
    nodes = finding.culprit.nodes if finding.class_ == "node" else _nodes(ranks, node_of)
    return replace(
        finding,
        what="; ".join([finding.what, *clauses]),
        culprit=replace(finding.culprit, ranks=ranks, nodes=nodes),
        followers=tuple(rank for rank in finding.followers if rank not in others),
    )


def _classify_end(end: RankEnd, culprit: Culprit, followers: tuple[int, ...]) -> Finding:
    kind = end.error_kind or how_ended(end.status)
    what, hint = f"{culprit} {_conjugate(words_of(end), culprit.ranks)}", ""
    patterns = set(end.patterns)
    class_: IncidentClass = "process" if end.error is None else "software"
    memory = not patterns.isdisjoint(MEMORY_PATTERNS) or end.error_kind in ("OutOfMemoryError", "MemoryError")
    permanent = end.error_kind in CODE_ERRORS
    if permanent:
        hint = "fix the code: no restart changes this error"
    if not patterns.isdisjoint(NODE_PATTERNS):
        class_, permanent = "node", False
    elif not patterns.isdisjoint(STORAGE_PATTERNS) or end.status == -signal.SIGBUS:
        class_, hint = "storage", "see the space and the health of the file system; a mapped file may have been cut"
    if end.exit_status in _PERMANENT:
        (class_, hint), permanent = _PERMANENT[end.exit_status], True
    elif end.exit_status == Exit.CHECKPOINT:
        class_ = "storage"
    evidence = (
        *(f"its output shows {name}" for name in sorted(patterns) if ":" not in name),
        *end.last_lines[-1:] * (end.error is None),
    )
    signature = f"{class_}: {kind} of {format_ranks(culprit.ranks)}" if class_ == "process" else f"{class_}: {kind}"
    return Finding(
        class_, what, culprit, end.time, signature, evidence, hint, followers, permanent=permanent, memory=memory
    )


def words_of(end: RankEnd) -> str:
    """Return how a rank ended, as a verb and what follows."""
    if end.error:
        kind = f"{end.error_kind}: " if end.error_kind not in end.error else ""
        return f"failed: {kind}{end.error.strip().splitlines()[-1]}"
    if end.status is None:
        return "ended before the job's end, and only its launcher knows with which status"
    if end.status < 0:
        memory = ", out of memory" if not MEMORY_PATTERNS.isdisjoint(end.patterns) else ""
        return f"was killed by {how_ended(end.status)}{memory}"
    return f"ended with status {end.status} and no error, before the job's end"


def _classify_lost_peers(ends: Sequence[RankEnd], node_of: Mapping[int, str]) -> Finding:
    """Return the finding about ranks that only lost peers, while all agents answer: a partial network."""
    links = Counter(
        frozenset((node_of[end.rank], node_of[peer]))
        for end in ends
        for peer in end.peers
        if peer in node_of and node_of[peer] != node_of[end.rank]
    )
    named = Counter(node for link in links for node in link)
    most = [node for node, count in named.items() if count == max(named.values())]
    nodes = tuple(sorted(most if len(most) == 1 else named))
    ranks = tuple(sorted(end.rank for end in ends))
    first = min(ends, key=lambda end: end.time, default=None)
    since = first.time if first else 0.0
    errors = (f"rank {first.rank}: {first.error.splitlines()[0]}",) if first and first.error else ()
    if not links:
        what = f"{format_ranks(ranks)} lost a peer, and no rank failed before" if ranks else "the ranks ended"
        return Finding("unknown", what, Culprit(), since, "unknown: lost peers", errors, followers=ranks, end=first)
    pairs = "; ".join(" and ".join(sorted(link)) for link, _ in links.most_common(3))
    what = f"nodes {pairs} do not reach each other, and all reach the driver"
    hint = "see the links of these nodes: megascale doctor nodes"
    signature = f"network: {' '.join(nodes)}"
    return Finding("network", what, Culprit((), nodes), since, signature, errors, hint, followers=ranks, end=first)


def classify_lost_nodes(
    reasons: Mapping[str, str], since: float, ranks: Iterable[int] = (), followers: Iterable[int] = ()
) -> Finding:
    """Return the finding about nodes that the driver has lost, with all their ranks. `reasons`: by node."""
    nodes = tuple(reasons)
    first, *more = reasons.values()
    what = f"nodes {format_nodes(nodes)} were lost: {first}" if more else f"node {nodes[0]} was lost: {first}"
    evidence = tuple(f"node {node}: {reason}" for node, reason in reasons.items()) if more else ()
    culprit = Culprit(tuple(sorted(ranks)), nodes)
    signature = f"node: {' '.join(nodes)}"
    return Finding("node", what, culprit, since, signature, evidence, followers=tuple(sorted(followers)))


IS_STOPPED = "is stopped (SIGSTOP, a debugger or a frozen container)"

_HANG_WORDS = {
    "stopped": IS_STOPPED,
    "spinning": "computes and makes no progress",
    "locked": "sleeps in a call that holds Python's lock",
    "storage": "waits for storage",
    "data": "hangs in its data loader",
    "dead": "has ended",
    "collective": "did not join a collective in which others wait",
    "divergence": "makes other calls than the rest",
    "device": "waits for its device",
    "network": "waits for data that other ranks have sent",
}

_PLURALS = {
    "is": "are", "was": "were", "has": "have", "computes": "compute", "sleeps": "sleep", "waits": "wait",
    "hangs": "hang", "makes": "make",
}  # fmt: skip


def _conjugate(words: str, ranks: Sequence[int]) -> str:
    """Return words that begin with a verb, as of one rank or of several."""
    verb, _, rest = words.partition(" ")
    return f"{_PLURALS.get(verb, verb)} {rest}" if len(ranks) > 1 else words


def classify_hang(
    verdict: Verdict,
    since: float,
    node_of: Mapping[int, str],
    waiting: Sequence[int],
    stacks: Mapping[int, str],
    doubted: Sequence[int] = (),
) -> Finding:
    """Return the finding about a job without progress. `waiting`: its ranks; `stacks`: by rank, of the culprits;
    `doubted`: ranks of the group in which a verdict without a culprit sees the fault.
    """
    ranks = tuple(verdict.ranks)
    culprit = Culprit(ranks, _nodes(ranks or doubted, node_of), verdict.group)
    class_: IncidentClass = "storage" if verdict.kind == "storage" else "hang"
    class_ = "network" if verdict.kind == "network" else class_
    words = _conjugate(_HANG_WORDS.get(verdict.kind, "makes no progress"), ranks)
    what = f"{culprit} {words}" if verdict.confident and ranks else f"the job hangs, and the culprit is among {culprit}"
    if not ranks:
        where = f" in group {verdict.group}" if verdict.group else ""
        what = f"the job hangs{where}, and no rank differs from the others"
    tops = tuple(f"rank {rank} in {frame}" for rank, stack in stacks.items() if (frame := innermost_frame(stack)))
    followers = tuple(sorted(set(waiting) - set(ranks)))
    kind = verdict.kind if class_ == "hang" else "waiting"
    signature = f"{class_}: {kind} of {format_ranks(ranks) if ranks else verdict.group}"
    return Finding(class_, what, culprit, since, signature, (*verdict.evidence, *tops[:2]), followers=followers)


def hang_words(verdict: Verdict, records: Mapping[int, RankState]) -> str:
    """Return the verdict about a hang in words. A rank without a heartbeat, of whose process nothing is known, may be
    stopped.
    """
    nodes = {rank: record.node for rank, record in records.items() if record.node}
    if verdict.kind == "locked" and verdict.confident:
        rank = verdict.ranks[0]
        silent_s = records[rank].silent_s
        if not records[rank].letter and silent_s > SILENT_S:
            who = Culprit((rank,), (nodes[rank],) if rank in nodes else ())
            why = "it is stopped (SIGSTOP, a debugger or a frozen container), or code holds Python's lock"
            return f"{who} has had no heartbeat for {format_duration(silent_s)}: {why}"
    return classify_hang(verdict, 0.0, nodes, tuple(records), {}).what


def innermost_frame(stack: str) -> str:
    """Return the innermost frame of a stack by py-spy, "" if it has none."""
    lines = [line.strip() for line in stack.splitlines() if line.startswith((" ", "\t")) and "(" in line]
    return lines[0] if lines else ""


def _nodes(ranks: Sequence[int], node_of: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(sorted({node_of[rank] for rank in ranks if rank in node_of}))
