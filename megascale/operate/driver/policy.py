"""The policy: the action about an incident, from the incidents before it, the `[fault]` settings and the spare nodes.

| incident | action |
|---|---|
| loss or weights not finite; the user's code, configuration or data at fault | stop with 93 |
| the same step failed the same way `same_step_failures` times (`oom_failures` when out of memory) | stop with 93 |
| `restarts_per_hour` used up | stop with 93 |
| nodes lost, or their hardware failed | replace the nodes, as far as there are spares or further nodes |
| network: nodes do not reach each other | restart; replace the node at `network_faults` within `network_window_s` |
| a rank killed, failed or hung; storage | restart in place `restarts_in_place` times, then replace the node |
| a hang without a single culprit | replace the nodes of the parallel group if spares suffice, else restart once |

The order and the defaults are ByteRobust's (arXiv 2509.16293, 4 and 5) and NVRx's. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascale.config.fault import FaultConfig
from megascale.core.errors import Exit
from megascale.operate.driver.classify import Finding
from megascale.operate.driver.incidents import RESTARTS, Action, Incident
from megascale.operate.driver.roster import format_nodes

HOUR_S = 3600.0


@dataclass(frozen=True)
class SparePool:
    """Nodes to replace others. `spares`: joined, checked and idle; `requestable`: the scheduler may have more;
    `revivable`: an agent can be started again on a lost node; `shrinkable`: the layout works with fewer nodes.
    """

    spares: int
    requestable: bool = False
    revivable: bool = False
    shrinkable: bool = False


def decide(
    finding: Finding, step: int, now: float, history: Sequence[Incident], settings: FaultConfig, reserve: SparePool
) -> Action:
    """Return the action about a fault after `step`. `history`: incidents since a person was called, oldest first."""
    restarts = [incident for incident in history if incident.action.kind in RESTARTS]
    if stop := _reason_to_stop(finding, step, now, restarts, settings):
        return Action("stop", f"stopping with status {Exit.DO_NOT_REQUEUE}: {stop}", status=Exit.DO_NOT_REQUEUE)
    if finding.class_ == "node":
        return _replace(finding.culprit.nodes, settings, reserve, lost=True)
    if finding.class_ == "network":
        alerts = 1 + _count(restarts, finding.culprit.nodes, now - settings.network_window_s, "network")
        if alerts >= settings.network_faults and len(finding.culprit.nodes) == 1:
            return _replace(finding.culprit.nodes, settings, reserve)
        return _restart(f"fault {alerts} of the network")
    if finding.class_ == "unknown" or not finding.culprit.ranks or len(finding.culprit.nodes) != 1:
        return _without_culprit(finding, step, restarts, settings, reserve)
    earlier = _count(restarts, finding.culprit.nodes, now - settings.node_window_s)
    if earlier < settings.restarts_in_place:
        return _restart(f"restart {earlier + 1} of {settings.restarts_in_place} on this node")
    return _replace(finding.culprit.nodes, settings, reserve)


def _reason_to_stop(
    finding: Finding, step: int, now: float, restarts: Sequence[Incident], settings: FaultConfig
) -> str:
    if finding.permanent:
        return "a restart would fail in the same way"
    same = 1 + sum(incident.signature == finding.signature and incident.step == step for incident in restarts)
    limit = settings.oom_failures if finding.memory else settings.same_step_failures
    if same >= limit and finding.class_ != "node":
        return f"step {step + 1} has failed in this way {same} times"
    recent = sum(incident.verdict > now - HOUR_S for incident in restarts)
    if recent >= settings.restarts_per_hour:
        return f"{recent} restarts within an hour, as many as fault.restarts_per_hour allows"
    return ""


def _count(restarts: Sequence[Incident], nodes: Sequence[str], since: float, class_: str = "") -> int:
    """Count the restarts after a time that some of these nodes had caused, of one class or of all."""
    return sum(
        incident.verdict > since
        and not set(nodes).isdisjoint(incident.culprit.nodes)
        and class_ in ("", incident.class_)
        for incident in restarts
    )


def _without_culprit(
    finding: Finding, step: int, restarts: Sequence[Incident], settings: FaultConfig, reserve: SparePool
) -> Action:
    """Replace all nodes that may be at fault if spares suffice; else restart, which costs little if it was a chance."""
    nodes = finding.culprit.nodes
    again = any(incident.signature == finding.signature for incident in restarts)
    if finding.class_ == "hang" and settings.replace_group and nodes and len(nodes) <= reserve.spares:
        return Action("replace_group", f"replacing the nodes in doubt, {', '.join(nodes)}, by spares", nodes)
    if again and nodes and len(nodes) <= reserve.spares:
        return Action("replace", f"replacing {', '.join(nodes)} by {_spares(len(nodes))}", nodes)
    return _restart("no single node can be blamed")


def _restart(reason: str) -> Action:
    return Action("restart", f"restarting the ranks in place ({reason})")


def _replace(nodes: Sequence[str], settings: FaultConfig, reserve: SparePool, *, lost: bool = False) -> Action:
    """Replace nodes by spares, else by nodes that the scheduler may give; without either keep those that live.

    Spares that do not suffice replace some of the nodes, and the others may come back: many at once are lost by a
    switch. No nodes: a place of the job waited for a node in vain.
    """
    names = format_nodes(nodes) or "a lost node"
    if nodes and reserve.spares >= len(nodes):
        return Action("replace", f"replacing {names} by {_spares(len(nodes))}", tuple(nodes))
    if nodes and lost and reserve.revivable:
        return Action("restart", f"starting the agent of {names} again: there is no spare")
    if not lost:
        return _restart("there is no spare")
    if nodes and reserve.spares:
        first, others = nodes[: reserve.spares], nodes[reserve.spares :]
        how = f"{format_nodes(first)} by {_spares(len(first))}, and waiting for {format_nodes(others)}"
        return Action("replace", f"replacing {how}", tuple(first))
    if nodes and reserve.requestable:
        wait = settings.replacement_wait_s
        return Action("replace", f"asking the scheduler for a node instead of {names}", tuple(nodes), wait_s=wait)
    if settings.shrink and reserve.shrinkable:
        return Action("shrink", f"continuing without {names}: there is no spare", tuple(nodes))
    reason = f"stopping with status {Exit.DO_NOT_REQUEUE}: {names} cannot be replaced, there is no spare"
    return Action("stop", reason, tuple(nodes), status=Exit.DO_NOT_REQUEUE)


def _spares(count: int) -> str:
    return "a spare" if count == 1 else f"{count} spares"
