"""The diagnosis of a run from its folder: who hangs and why, who waits for whom, and who is slow.

The sources, each as far as it is there: flight records in this host's shared memory; the newest states of all ranks in
the event store, also of ranks that are gone; the log of incidents; dumps of NCCL's flight recorder; error files.

- `diagnose`: read everything; `RunDiagnosis`: the result
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.config.fault import FaultConfig
from megascale.core.flight_layout import Phase
from megascale.core.flight_record import FlightRecord, FlightRecordError
from megascale.core.process import process_state
from megascale.eventstore.query import StoreError, fetch, open_store
from megascale.fault.classify import classify_hang
from megascale.fault.incidents import Incident
from megascale.fault.stacks import stack_of
from megascale.launch.failure import ERROR_FILE_NAME
from megascale.launch.flight import DUMP_FOLDER, Suspect, find_suspect
from megascale.layout.topology import Topology
from megascale.observe.hang import Verdict, hang_verdict
from megascale.observe.wait_chain import GroupWait, describe_chain, group_waits, longest_chain, routes_to
from megascale.observe.waits import WaitGraph, wait_graph
from megascale.view.rank_states import local_records
from megascale.view.run_view import RunView, slow_phase_s
from megascale.view.signs import idle_limit_s

if TYPE_CHECKING:
    from megascale.observe.findings import Finding

MOST_CULPRITS = 4
"""Most culprits that are described."""

THIS_HOST, EVENT_STORE = "flight records on this host", "event store"


@dataclass(frozen=True)
class KnownRanks:
    """The newest record of each rank, the letter of its process, and where both are from. `ages_s`: seconds since a
    record was read; `hosts`: by rank, as far as known.
    """

    records: Mapping[int, FlightRecord]
    states: Mapping[int, str] = field(default_factory=dict)
    sources: Mapping[int, str] = field(default_factory=dict)
    ages_s: Mapping[int, float] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)

    @property
    def idle_s(self) -> float:
        """Seconds for which no rank had made progress when it was last seen. A rank that is done makes none."""
        return min((r.idle_s for r in self.records.values() if r.phase != Phase.DONE), default=0.0)

    @property
    def age_s(self) -> float:
        """Seconds since the oldest record was read."""
        return max(self.ages_s.values(), default=0.0)


@dataclass(frozen=True)
class Hang:
    """A hang: the verdict, the graph of the waits, the longest chain to the culprit, and groups with waiting ranks.

    `what`: the verdict in words; `routes`: see `observe.wait_chain.routes_to`; `stacks`: by rank, of culprits here.
    """

    verdict: Verdict
    what: str
    graph: WaitGraph
    routes: Mapping[int, int]
    chain: Sequence[str]
    groups: Sequence[GroupWait]
    stacks: Mapping[int, str]


@dataclass(frozen=True)
class RunDiagnosis:
    """What is known of a run. `hang`: None if ranks make progress, or none is known.

    `findings`: slow ranks, links and phases, None without an event store: `no_findings` says why. `suspect`: by NCCL's
    flight recorder; `error`: the first error that a rank of the last attempt wrote.
    """

    view: RunView
    ranks: KnownRanks
    hang: Hang | None
    incidents: Sequence[Incident]
    findings: Sequence[Finding] | None
    no_findings: str
    suspect: Suspect | None
    error: Mapping[str, Any] | None

    @property
    def is_empty(self) -> bool:
        """True if nothing says anything about the ranks of the run."""
        return not (self.ranks.records or self.incidents or self.findings or self.suspect or self.error)


def diagnose(view: RunView, *, stacks: bool = True) -> RunDiagnosis:
    """Diagnose a run. `stacks`: take the stacks of culprits on this host, if they live."""
    ranks = _known_ranks(view)
    hang = _hang(view, ranks, stacks) if ranks.records and _stands_still(view, ranks) else None
    findings, reason = _findings(view.folder)
    dumps = view.folder / DUMP_FOLDER
    suspect = find_suspect(dumps) if dumps.is_dir() else None
    return RunDiagnosis(view, ranks, hang, view.incidents, findings, reason, suspect, _first_error(view.folder))


def rank_name(rank: int, topology: Topology) -> str:
    """Return "rank 3 (dp 1, pp 0, tp 1)", with the axes that are longer than 1."""
    if not 0 <= rank < topology.world_size:
        return f"rank {rank}"
    coord = topology.coord(rank)
    axes = [f"{axis} {getattr(coord, axis)}" for axis in ("dp", "pp", "tp", "cp") if getattr(topology, axis) > 1]
    return f"rank {rank}{f' ({", ".join(axes)})' if axes else ''}"


def _known_ranks(view: RunView) -> KnownRanks:
    """Read the records in this host's shared memory, and for other ranks the states in the event store."""
    records, states = local_records(view.name), {}
    for rank, record in records.items():
        with contextlib.suppress(OSError):
            states[rank] = process_state(record.pid)
    sources, ages = dict.fromkeys(records, THIS_HOST), dict.fromkeys(records, 0.0)
    stored, hosts = _stored_states(view.folder)
    attempt = max((record.attempt for record in records.values()), default=0)
    for rank, (time_ns, record) in stored.items():
        if rank not in records and record.attempt >= attempt:
            records[rank], sources[rank] = record, EVENT_STORE
            ages[rank] = max(0.0, time.time() - time_ns / 1e9)
    return KnownRanks(dict(sorted(records.items())), states, sources, ages, hosts)


def _stored_states(folder: Path) -> tuple[dict[int, tuple[int, FlightRecord]], dict[int, str]]:
    """Return the newest state of each rank of the last attempt with its time, and the hosts of ranks."""
    try:
        store = open_store(folder)
    except StoreError:
        return {}, {}
    newest = "attempt = (SELECT max(attempt) FROM {0})"
    rows = fetch(store, f"SELECT rank, time_ns, record FROM states WHERE {newest.format('states')} ORDER BY time_ns")
    found = {}
    for rank, time_ns, text in zip(rows["rank"], rows["time_ns"], rows["record"], strict=True):
        with contextlib.suppress(FlightRecordError, ValueError):
            found[int(rank)] = int(time_ns), FlightRecord.from_dict(json.loads(text))
    hosts = fetch(store, f"SELECT rank, host FROM ranks WHERE {newest.format('ranks')}")
    return found, {int(rank): str(host) for rank, host in zip(hosts["rank"], hosts["host"], strict=True)}


def _stands_still(view: RunView, ranks: KnownRanks) -> bool:
    """Return True if no rank had made progress for longer than its phase explains."""
    settings = view.config.fault if view.config is not None else FaultConfig()
    working = [record for record in ranks.records.values() if record.phase != Phase.DONE]
    if not working:
        return False
    step_s = max(record.step_time_s for record in working)
    limit_s = max(idle_limit_s(step_s), *(slow_phase_s(record.phase, settings) for record in working))
    stopped = any(state in ("T", "t") for state in ranks.states.values())
    return ranks.idle_s >= (min(limit_s, idle_limit_s(step_s)) if stopped else limit_s)


def _hang(view: RunView, ranks: KnownRanks, stacks: bool) -> Hang:
    verdict, graph = hang_verdict(ranks.records, ranks.states), wait_graph(ranks.records)
    routes = routes_to(verdict.ranks, graph)
    chain = longest_chain(routes)
    here = [rank for rank in verdict.ranks if ranks.sources.get(rank) == THIS_HOST][:MOST_CULPRITS]
    taken = {rank: stack_of(ranks.records[rank].pid) for rank in here} if stacks else {}
    finding = classify_hang(verdict, 0.0, ranks.hosts, tuple(ranks.records), taken)
    names = {rank: rank_name(rank, view.topology) for rank in chain}
    lines, groups = describe_chain(chain, graph, names), group_waits(graph, verdict.ranks)
    return Hang(verdict, finding.what, graph, routes, lines, groups, taken)


def _findings(folder: Path) -> tuple[list[Finding] | None, str]:
    from megascale.observe.findings import findings

    try:
        return findings(open_store(folder)), ""
    except StoreError as error:
        return None, error.message


def _first_error(folder: Path) -> dict[str, Any] | None:
    """Return the first error of the ranks of the last attempt that does not only tell of a lost peer."""
    logs = folder / "logs"
    attempts = sorted(logs.glob("attempt-*"), key=lambda path: path.stat().st_mtime)
    errors = []
    for path in (attempts[-1] if attempts else logs).glob(ERROR_FILE_NAME.format("*")):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
            if record.get("what") and not record.get("peer_was_lost"):
                errors.append(record)
    return min(errors, key=lambda record: record["time"], default=None)
