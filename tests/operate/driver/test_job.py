"""The state machine of a job, on simulated nodes: every fault ends in training, or in a status that says why not."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lab.simulation import Simulation
from megascale.config.fault import FaultConfig
from megascale.core.errors import Exit
from megascale.operate.channel.messages import (
    Collect,
    Heartbeat,
    Hello,
    Prepare,
    RankEnd,
    RanksEnded,
    Records,
    Start,
    Stop,
    StoreOpened,
)
from megascale.operate.diagnose.hang.hang import Verdict
from megascale.operate.driver import attempt
from megascale.operate.driver.commands import Exclude, Finish, Request, Say, Send, StartAgent
from megascale.operate.driver.decisions import ends_to_replace, summary
from megascale.operate.driver.incidents import Action, Culprit, Incident, JobHistory
from megascale.operate.driver.job import Job
from megascale.operate.driver.job_state import SETTLE_S, JobPlan, SmallerLayout, Stage
from megascale.operate.driver.watch import ProgressWatch
from megascale.record.layout import NEWEST
from megascale.record.log import LogIdentity, RankLog
from megascale.record.log_reader import LogReader
from megascale.record.rank_state import RankState, RankStatus

PLAN = JobPlan("run", 4, 16, ("train",), "/logs")


def simulation(spares: int = 1, more_nodes: int = 0, plan: JobPlan = PLAN, **settings: Any) -> Simulation:
    sim = Simulation(plan, FaultConfig(**settings), spares, more_nodes=more_nodes)
    sim.run(1000.0)
    assert sim.trains
    assert sim.steps > 80
    return sim


def recovers(sim: Simulation, seconds: float = 300.0) -> Any:
    """Run until the job trains again; return the last incident."""
    before = sim.steps
    sim.run(sim.now + seconds)
    assert sim.status is None, sim.said[-1]
    assert sim.trains
    assert sim.steps > before
    incident = list(sim.job.history.incidents.values())[-1]
    assert incident.recovered is not None
    return incident


def test_a_killed_rank_is_restarted_in_place_then_its_node_is_replaced() -> None:
    sim = simulation()
    sim.fail_rank(5)
    first = recovers(sim)
    assert (first.class_, first.culprit.ranks, first.culprit.nodes) == ("process", (5,), ("node1",))
    assert first.action.kind == "restart"
    assert first.verdict_s < 2
    sim.fail_rank(6)
    second = recovers(sim)
    assert (second.action.kind, second.action.nodes) == ("replace", ("node1",))
    assert sim.job.history.nodes == ("node0", "node4", "node2", "node3"), (
        "the spare takes the place, ranks stay in order"
    )


def prepared(sim: Simulation) -> set[str]:
    """Let time pass, and return the nodes that are told to have the processes of four ranks in standby."""
    for member in sim.job.roster.members.values():
        member.heard = sim.now
    return {c.node for c in sim.job.tick(sim.now) if isinstance(c, Send) and c.message == Prepare(4)}


@pytest.mark.parametrize(("standby", "nodes"), [("spares", "4"), ("nodes", "01234"), ("none", "")])
def test_nodes_have_processes_in_standby_once_the_job_trains(standby: str, nodes: str) -> None:
    sim = Simulation(PLAN, FaultConfig(standby=standby), 1)
    while sim.job.stage is not Stage.RUN:
        sim.run(sim.now + 0.2)
    assert prepared(sim) == set(), "ranks that start need the cores"
    sim.run(1000.0)
    assert prepared(sim) == {f"node{number}" for number in nodes}
    assert prepared(sim) == set(), "they have been told"
    sim.lose_node("node2")
    recovers(sim)
    assert prepared(sim) == ({"node0", "node1", "node3", "node4"} if standby == "nodes" else set())


def test_a_lost_node_is_replaced_by_a_spare_and_the_next_by_the_scheduler() -> None:
    sim = simulation(spares=1, more_nodes=1, plan=JobPlan("run", 4, 16, (), "/logs", requestable=True, revivable=False))
    sim.lose_node("node2")
    assert recovers(sim).culprit.nodes == ("node2",)
    sim.lose_node("node0")
    assert recovers(sim, 900.0).action.wait_s > 0
    assert sim.job.history.nodes == ("node5", "node1", "node4", "node3")
    sim.lose_node("node1")
    sim.run(sim.now + 2000)
    assert sim.status == Exit.DO_NOT_REQUEUE, "no node is left"


def test_an_agent_that_ended_is_started_again_without_a_spare() -> None:
    sim = simulation(spares=0)
    sim.lose_node("node2")
    assert recovers(sim).action.kind == "restart"
    assert sim.job.history.nodes == ("node0", "node1", "node2", "node3")


def test_a_node_that_fails_its_checks_while_its_ranks_end_leaves_the_job() -> None:
    sim = simulation(plan=replace(PLAN, checks=True))
    sim.hang(Verdict("collective", (5,)), 5.0)
    while sim.job.stage is not Stage.STOP:
        sim.run(sim.now + 0.2)
    sim._perform(sim.job.checked("node1", "memory: slow", sim.now))
    assert recovers(sim).culprit.nodes == ("node1",)
    assert sim.job.history.nodes == ("node0", "node4", "node2", "node3")
    assert any("node node1 failed its checks: memory: slow" in line for _, line in sim.said)
    count = len(sim.said)
    sim._perform(sim.job.agent_ended("node1", "it was told to leave", sim.now))
    assert len(sim.said) == count, "no news"


def test_a_job_whose_nodes_all_fail_their_checks_stops_with_the_reason() -> None:
    """More nodes of the same host would fail, too."""
    sim = Simulation(replace(PLAN, checks=True), FaultConfig(), 1)
    for node in [*sim.job.roster.order]:
        sim._perform(sim.job.checked(node, "memory: no result within 5 s", sim.now))
    sim.run(sim.now + 5.0)
    assert sim.status == Exit.DO_NOT_REQUEUE
    (incident,) = sim.job.history.incidents.values()
    assert "nodes have failed their checks" in incident.what
    assert incident.evidence[0] == "node0: memory: no result within 5 s"
    assert "fault.check_timeout_s" in incident.hint


def test_of_each_bad_link_one_end_leaves_if_there_is_a_spare() -> None:
    job = simulation(spares=1).job
    assert list(ends_to_replace(job, [("node1", "node3")])) == ["node3"]
    assert list(ends_to_replace(job, [("node1", "node3"), ("node0", "node1"), ("node1", "node2")])) == ["node1"]
    assert "node1" in ends_to_replace(job, [("node1", "node3")])["node3"]
    assert ends_to_replace(job, [("node1", "node3"), ("node0", "node2")]) == {}, "there is one spare"
    assert ends_to_replace(job, [("node1", "node3")], others=1) == {}
    assert ends_to_replace(job, []) == {}


def status(step: int, idle_s: float, first: int = 7) -> RankStatus:
    return RankStatus(0, 1, "step", step, first, idle_s, 0.0, 0.5)


@pytest.mark.parametrize(("known", "found_after"), [(math.inf, 300.0), (2.0, 30.0), (100.0, 300.0), (0.0, 10.0)])
def test_a_hang_in_the_first_step_of_nodes_that_have_trained_is_found_sooner(known: float, found_after: float) -> None:
    watch = ProgressWatch(FaultConfig(), 0.0, known)
    watch.beat([status(7, 0.0)], 50.0)
    assert not watch.hangs([status(7, found_after - 1)], 50.0 + found_after - 1)
    assert watch.hangs([status(7, found_after)], 50.0 + found_after)
    assert not watch.hangs([RankStatus(0, 1, "load", 0, 0, 299.0, 0.0, 0.5)], 349.0), "what comes before has no measure"
    assert watch.first_step_took is None
    watch.beat([status(8, 0.0)], 53.0)
    assert watch.first_step_took == 3.0
    assert watch.hangs([status(8, 4.0)], 57.0)


def test_the_phase_of_a_rank_that_waits_explains_no_hang() -> None:
    """Ranks in a checkpoint wait for a rank that hangs in its step; ranks that all wait may be sending much."""
    watch = ProgressWatch(FaultConfig(), 0.0)
    watch.beat([status(7, 0.0)], 1.0)
    watch.beat([status(8, 0.0)], 2.0)
    waiting = RankStatus(1, 1, "checkpoint", 8, 1, 4.0, 0.0, 0.5, 7, waits=True)
    saving = waiting._replace(waits=False)
    stuck = status(8, 4.0)._replace(waits=False)
    assert watch.hangs([stuck, waiting], 6.0)
    assert not watch.hangs([stuck, saving], 6.0)
    assert not watch.hangs([waiting, waiting], 6.0)
    assert watch.hangs([waiting, waiting], 2.0 + FaultConfig().checkpoint_hang_s)


def test_a_job_that_waits_for_sites_hangs_after_their_bound() -> None:
    """Of the plan, from which the driver makes the watch of every attempt."""
    job = simulation().job
    job.plan = replace(job.plan, sites_hang_s=20.0)
    watch = job.new_watch(0.0)
    watch.beat([status(7, 0.0)], 1.0)
    watch.beat([status(8, 0.0)], 2.0)
    waits = status(8, 0.0)._replace(phase="sites")
    assert not watch.hangs([waits], 21.5)
    assert watch.hangs([waits], 22.0)


def test_the_first_step_of_an_attempt_is_the_measure_of_the_next() -> None:
    sim = simulation()
    took = sim.job.attempt.watch.first_step_took  # type: ignore[union-attr]
    assert took and sim.job.first_steps == dict.fromkeys(("node0", "node1", "node2", "node3"), took)
    sim.lose_node("node2")
    recovers(sim)
    assert set(sim.job.first_steps) == {"node0", "node1", "node2", "node3", "node4"}


def test_two_nodes_at_once_are_one_incident() -> None:
    sim = simulation(spares=2)
    sim.lose_node("node1")
    sim.lose_node("node3")
    recovers(sim)
    assert len(sim.job.history.incidents) == 1
    assert sim.job.history.nodes[0] == "node0"


def test_heartbeats_of_a_job_that_stands_still_do_not_each_cost_a_look_at_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = simulation()
    looks, hangs = [], ProgressWatch.hangs
    monkeypatch.setattr(ProgressWatch, "hangs", lambda *all: looks.append(1) or hangs(*all))
    for beat in range(100):
        status = RankStatus(0, 1, "step", 100, 1, 20.0, 0.0, 10.0)
        sim.job.receive("node0", Heartbeat(0.0, 0, (status,)), sim.now + 20.0 + beat / 100)
    assert sim.job.stage == Stage.RUN
    assert 1 <= len(looks) <= 6, "a look every 0.2 s of a second"


IN_ALLOCATION = JobPlan("run", 8, 32, (), "/logs", requestable=True, revivable=False)


def test_nodes_that_are_lost_at_once_are_replaced_at_once() -> None:
    """A switch, or the power of a rack: every node that waits for a verdict of its own costs a minute."""
    sim = simulation(spares=3, plan=IN_ALLOCATION)
    for node in ("node1", "node2", "node5"):
        sim.lose_node(node)
    incident = recovers(sim, 90.0)
    assert incident.culprit.nodes == incident.action.nodes == ("node1", "node2", "node5")
    assert incident.culprit.ranks == (4, 5, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23)
    assert "nodes node1, node2, node5 were lost: its agent ended" in incident.what
    assert sim.job.history.nodes == ("node0", "node8", "node9", "node3", "node4", "node10", "node6", "node7")
    assert len(sim.job.history.incidents) == 1


def test_a_node_that_is_lost_after_the_verdict_leaves_its_place_to_a_spare() -> None:
    sim = simulation(spares=2, plan=IN_ALLOCATION)
    sim.lose_node("node1")
    while sim.job.stage is not Stage.STOP:
        sim.run(sim.now + 0.2)
    sim.lose_node("node2")
    sim.timing = replace(sim.timing, agent_s=math.inf)  # it does not come back
    assert recovers(sim, 90.0).action.nodes == ("node1",)
    assert len(sim.job.history.incidents) == 1
    assert sim.job.history.nodes[:3] == ("node0", "node8", "node9")
    assert any(line == "a spare takes the place of node2, lost meanwhile" for _, line in sim.said)


def test_of_more_lost_nodes_than_spares_some_are_replaced_and_the_others_may_come_back() -> None:
    sim = simulation(spares=1, plan=IN_ALLOCATION)
    for node in ("node1", "node2", "node5"):
        sim.lose_node(node)
    assert recovers(sim, 90.0).action.nodes == ("node1",)
    assert list(sim.excluded) == ["node1"]
    assert sim.job.history.nodes[:3] == ("node0", "node8", "node2")


def test_nodes_that_do_not_come_back_are_replaced_together() -> None:
    sim = simulation(spares=1, more_nodes=2, plan=IN_ALLOCATION)
    sim.timing = replace(sim.timing, agent_s=200.0)  # more than an agent has
    for node in ("node1", "node2", "node5"):
        sim.lose_node(node)
    incident = recovers(sim, 900.0)
    assert incident.action.nodes == ("node2", "node5")
    assert list(sim.excluded) == ["node1", "node2", "node5"]
    assert len(sim.job.history.incidents) == 2


def test_an_agent_that_ends_before_it_joins_is_started_again_after_ever_longer_pauses() -> None:
    """Each start may fail for a while, of a want of memory; the budget of restarts is not for one instant."""
    sim = simulation(spares=0)
    sim.broken = {"node2": "its agent ended, status 1: out of memory"}
    sim.lose_node("node2")
    sim.run(sim.now + 100.0)
    incidents = list(sim.job.history.incidents.values())
    assert [incident.action.kind for incident in incidents] == ["restart"] * 5
    assert "before it joined, its agent ended, status 1: out of memory" in incidents[-1].what
    verdicts = [incident.verdict for incident in incidents]
    pauses = [after - before - sim.timing.agent_s for before, after in itertools.pairwise(verdicts[1:])]
    assert pauses == pytest.approx([5.0, 10.0, 20.0], abs=1.0)
    sim.broken.clear()
    recovers(sim)
    assert sim.job.history.nodes[2] == "node2"
    sim.broken = {"node2": "status 1"}
    sim.lose_node("node2")
    sim.run(sim.now + 8000.0)
    assert sim.status == Exit.DO_NOT_REQUEUE
    first, *_, last = [one.verdict for one in sim.job.history.incidents.values() if one.verdict > verdicts[-1]]
    assert last - first > 600.0, "a person is called at last"


def test_a_place_does_not_wait_for_an_agent_that_has_ended_before_it_joined() -> None:
    sim = simulation(spares=1, plan=IN_ALLOCATION)
    sim.broken = {"node5": "srun: no such node"}
    for node in ("node1", "node5"):
        sim.lose_node(node)
    sim.at(sim.now + 8.0, lambda: sim._expect(1))  # a node that joins by itself
    incident = recovers(sim, 100.0)
    assert incident.action.nodes == ("node5",)
    assert incident.verdict - sim.job.history.incidents[1].verdict < 20.0
    assert list(sim.job.history.nodes[:2]) == ["node0", "node8"]


def test_a_node_that_is_checked_is_not_named_where_too_few_are_left() -> None:
    cluster = Cluster().start()
    cluster.send("a", RanksEnded(0, (RankEnd(0, -9, 1.0),)))
    cluster.tick(1.0)
    cluster.job.roster.members["a"].held = True
    cluster.send("b", RanksEnded(0, (), stuck=(1,)))
    _, incident = cluster.job.history.incidents.values()
    assert (incident.culprit.nodes, incident.action.kind) == ((), "stop")


def test_a_node_that_an_earlier_launch_has_replaced_is_given_back_for_another() -> None:
    history = JobHistory(attempt=3, excluded={"b": 900.0, "c": 900.0, "d": 50.0})
    plan = JobPlan("run", 2, 2, ("train",), "/logs", requestable=True, revivable=False)
    job = Job(plan, FaultConfig(), history, 100.0)
    commands = [c for c in job.expect(["a", "b"], 100.0) if not isinstance(c, Say)]
    assert commands == [Exclude("b", "it was replaced before", 900.0), Request(1)]
    assert Request(1) in job.expect(["c"], 101.0), "it was replaced, too"
    assert job.expect(["d"], 102.0) == [], "its time is over"
    for node in "ad":
        job.receive(node, Hello(node, node, node, 1), 103.0)
    assert job.history.nodes == ("a", "d")


def test_a_job_without_a_node_in_place_of_an_excluded_one_says_so() -> None:
    plan = JobPlan("run", 2, 2, ("train",), "/logs", requestable=True, revivable=False)
    history = JobHistory(attempt=3, excluded={"b": 900.0})
    job = Job(plan, FaultConfig(), history, 100.0)
    job.expect(["a", "b"], 100.0)
    job.refused(101.0)
    (incident,) = job.history.incidents.values()
    assert incident.action.kind == "stop", "at once"
    assert incident.evidence == ("nodes replaced before, and excluded since: b",)
    assert "fault.node_exclusion_s" in incident.hint


@pytest.mark.parametrize(("status", "action"), [(Exit.DO_NOT_REQUEUE, "restart"), (Exit.STOPPED, "stop")])
def test_a_person_who_starts_a_job_again_after_93_starts_with_a_new_budget(status: int, action: str) -> None:
    first = Cluster().start()
    for number in range(FaultConfig().restarts_per_hour):
        incident = Incident(number + 1, "process", "", Culprit(), (), "", "", 0, 1, 1.0, 1.0, (), Action("restart"))
        first.job.history.apply({"event": "incident", "time": 1.0, "incident": incident.to_dict()})
    first.job.history.apply({"event": "ended", "time": 2.0, "status": int(status), "step": 1})
    first.job.history.apply({"event": "launch", "time": 3.0, "scheduler": "local"})
    second = Cluster(first.job.history)
    second.job.expect(["a", "b"], 3.0)
    for node in "ab":
        second.send(node, Hello(node, node, node, 1))
    second.send("a", StoreOpened(1, "a:1"))
    second.send("a", RanksEnded(1, (RankEnd(0, -9, 4.0),)))
    second.tick(4.0)
    assert list(second.job.history.incidents.values())[-1].action.kind == action


def test_what_12_288_ranks_do_costs_no_look_at_all_of_them_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict that names all ranks, then their ends, one message each: a driver that is busy for 30 s is killed."""
    nodes = 1536
    sim = Simulation(JobPlan("run", nodes, 8 * nodes, (), "/logs"), FaultConfig(), 0)
    sim.run(1000.0)
    assert sim.trains
    looks: Counter[str] = Counter()
    for module, name in ((attempt, "node_by_rank"), (attempt, "is_cascade")):
        call = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *all, name=name, call=call: looks.update([name]) or call(*all))
    everyone = tuple(range(8 * nodes))
    sim.hang(Verdict("device", everyone, confident=False, compare=everyone), 31.0)
    assert recovers(sim).class_ == "hang"
    assert looks["node_by_rank"] <= 2, "once an attempt"
    looks.clear()
    sim.end_ranks([RankEnd(rank, 1, sim.now, error="lost", peer_lost=True, stopped=True) for rank in everyone])
    assert recovers(sim).class_ == "unknown"
    assert looks["is_cascade"] <= 2 * len(everyone), "as an end comes, and in the verdict"


def test_a_hang_names_its_rank() -> None:
    sim = simulation()
    sim.hang(Verdict("stopped", (9,), "dp", ("state T",)), 31.0)
    incident = recovers(sim)
    assert (incident.class_, incident.culprit.ranks, incident.culprit.nodes) == ("hang", (9,), ("node2",))


def test_a_network_in_doubt_gets_time_and_a_flap_restarts_nothing() -> None:
    sim = simulation(link_recovery_s=20.0)
    sim.hang(Verdict("network", (9,), "pp"), 31.0)
    sim.run(sim.now + 32.0)
    incident = list(sim.job.history.incidents.values())[-1]
    assert (incident.action.kind, incident.class_) == ("wait", "network")
    assert sim.job.attempt is not None
    status = RankStatus(0, 1, "step", 200, 2, 0.0)
    sim.job.receive("node0", Heartbeat(sim.now, 0, (status,)), sim.now)
    sim.job.tick(sim.now + 1)
    assert sim.job.history.attempt == 0
    assert list(sim.job.history.incidents.values())[-1].recovered


def test_a_network_that_does_not_recover_is_restarted() -> None:
    sim = simulation(link_recovery_s=2.0)
    sim.hang(Verdict("network", (9,), "pp"), 31.0)
    recovers(sim)
    kinds = [incident.action.kind for incident in sim.job.history.incidents.values()]
    assert kinds == ["wait", "restart"]
    assert not any("the network is back" in line for _, line in sim.said)


def test_the_same_step_that_fails_the_same_way_stops_the_job() -> None:
    sim = simulation(spares=3)
    sim.fail_rank(5)
    sim.on_start = lambda: sim.fail_rank(5)
    sim.run(sim.now + 5000)
    assert sim.status == Exit.DO_NOT_REQUEUE
    assert len(sim.job.history.incidents) == 3
    assert any("in this way 3 times" in line for _, line in sim.said)


def test_a_run_that_diverged_is_not_restarted() -> None:
    sim = simulation()
    sim.end_ranks([RankEnd(0, 93, sim.now, error="loss is nan", error_kind="DivergenceError", exit_status=93)])
    sim.run(sim.now + 100)
    assert sim.status == Exit.DO_NOT_REQUEUE
    assert [incident.class_ for incident in sim.job.history.incidents.values()] == ["divergence"]


class Cluster:
    """A job of two nodes with one rank each, driven message by message."""

    def __init__(self, history: JobHistory | None = None, *, takeover: bool = False, **more: Any) -> None:
        plan = JobPlan("run", 2, 2, ("train",), "/logs", takeover=takeover, **more)
        self.job = Job(plan, FaultConfig(), history or JobHistory(), 0.0)
        self.job.hang_verdict = lambda records, states: Verdict("collective")
        self.now = 0.0

    def send(self, node: str, message: Any, after: float = 0.0) -> list[Any]:
        self.now += after
        return self.job.receive(node, message, self.now)

    def tick(self, after: float) -> list[Any]:
        self.now += after
        return self.job.tick(self.now)

    def start(self) -> Cluster:
        self.job.expect(["a", "b"], 0.0)
        self.send("b", Hello("b", "b", "b", 1))
        assert not any(isinstance(c, Finish) for c in self.send("a", Hello("a", "a", "a", 1)))
        sent = self.send("a", StoreOpened(0, "a:1"))
        assert [(c.node, c.message.ranks) for c in sent] == [("a", (0,)), ("b", (1,))]
        self.beat("step", 1)
        return self

    def beat(self, phase: str, step: int, idle: float = 0.0, attempt: int = 0, nodes: str = "ab") -> list[Any]:
        commands = []
        for node in nodes:
            rank = "ab".index(node)
            commands += self.send(node, Heartbeat(self.now, attempt, (RankStatus(rank, 1, phase, step, step, idle),)))
        return commands


def written(writer: RankLog) -> RankState:
    return replace(LogReader(writer.memory).state(), read_ns=1)


def test_ranks_fill_nodes_in_the_schedulers_order_not_as_they_join() -> None:
    assert list(Cluster().start().job.attempt.placement) == ["a", "b"]


def test_the_job_ends_when_all_ranks_have_left_in_order() -> None:
    cluster = Cluster().start()
    cluster.send("a", RanksEnded(0, (RankEnd(0, 0, 1.0, in_order=True),)))
    commands = cluster.send("b", RanksEnded(0, (RankEnd(1, 0, 1.0, in_order=True),)))
    assert Finish(0) in commands
    assert cluster.job.history.ended == 0


def test_an_attempt_resumes_once_an_earlier_one_of_the_launch_has_trained() -> None:
    """A run that must not resume what is there when it is launched resumes after a fault."""
    cluster = Cluster(JobHistory(attempt=3, step=7), resuming=("checkpoint.resume=auto",))
    cluster.job.history.apply({"event": "launch", "time": 0.0, "scheduler": "slurm"})
    cluster.job.history.step = 0
    cluster.job.expect(["a", "b"], 0.0)
    for node in "ab":
        cluster.send(node, Hello(node, node, node, 1))
    given = []
    for number in (4, 5, 6):
        orders = cluster.send("a", StoreOpened(number, "a:1"))
        given.append([c.message.arguments for c in orders if isinstance(c.message, Start)])
        if number == 5:
            for step in (8, 9):
                cluster.beat("step", step, attempt=number)
        cluster.send("a", RanksEnded(number, (RankEnd(0, -9, cluster.now),)))
        cluster.tick(SETTLE_S)
        cluster.send("b", RanksEnded(number, (RankEnd(1, -9, cluster.now, stopped=True),)))
    assert given == [[("train",)] * 2, [("train",)] * 2, [("train", "checkpoint.resume=auto")] * 2]


def test_a_job_that_ends_right_after_a_restart_has_recovered() -> None:
    cluster = Cluster().start()
    cluster.send("a", RanksEnded(0, (RankEnd(0, -9, 1.0),)))
    cluster.tick(1.0)
    cluster.send("a", RanksEnded(0, (RankEnd(0, -9, 1.0),)))
    cluster.send("b", RanksEnded(0, (RankEnd(1, -9, 1.0, stopped=True),)))
    cluster.send("a", StoreOpened(1, "a:1"))
    for rank, node in enumerate("ab"):
        cluster.send(node, RanksEnded(1, (RankEnd(rank, 0, 2.0, in_order=True),)))
    incident = cluster.job.history.incidents[1]
    assert cluster.job.history.ended == 0
    assert incident.recovered is not None
    assert incident.steps_lost is None


def test_a_silent_node_is_lost_and_a_driver_that_slept_blames_nobody() -> None:
    cluster = Cluster().start()
    cluster.tick(5.0)
    cluster.job.forgive(60.0)
    cluster.tick(60.0)
    assert cluster.job.attempt.lost == {}
    cluster.beat("step", 2, nodes="a")
    cluster.tick(4.0)
    assert list(cluster.job.attempt.lost) == ["b"]
    cluster.tick(1.0)
    assert cluster.job.history.incidents[1].class_ == "node"


def test_slow_phases_have_longer_bounds() -> None:
    for phase, bound in (
        ("step", 4.0),
        ("checkpoint", 120.0),
        ("evaluation", 60.0),
        ("load", 300.0),
        ("profile", 300.0),
    ):
        cluster = Cluster().start()
        cluster.beat("step", 2)
        cluster.now += bound - 0.5
        cluster.beat(phase, 2, idle=bound - 0.5)
        assert cluster.job.stage == "run", phase
        cluster.now += 1.0
        cluster.beat(phase, 2, idle=bound + 0.5)
        assert cluster.job.stage == "collect", phase


def test_a_verdict_may_ask_once_for_longer_records_of_some_ranks() -> None:
    cluster, verdicts = Cluster().start(), []

    def verdict(records: Any, states: Any) -> Verdict:
        verdicts.append((sorted(records), states))
        return Verdict("divergence", (0, 1), confident=False, compare=(1,))

    cluster.job.hang_verdict = verdict
    cluster.beat("step", 2)
    cluster.now += 5.0
    cluster.beat("step", 2, idle=5.0)
    record = RankLog(LogIdentity("run", 0, 2))
    cluster.send("a", Records(0, {0: written(record).to_dict()}, {0: "S"}))
    asked = cluster.send("b", Records(0, {1: written(record).to_dict()}, {1: "S"}))
    assert [(c.node, c.message) for c in asked] == [("b", Collect(0, ranks=(1,), events=NEWEST))]
    stacks = cluster.send("b", Records(0, {1: written(record).to_dict()}, {1: "S"}))
    assert verdicts == [([0, 1], {0: "S", 1: "S"})] * 2, "the second verdict has the records of all"
    assert sorted((c.node, c.message.stacks) for c in stacks) == [("a", True), ("b", True)], "it asks for records once"


def test_the_first_step_may_take_as_long_as_the_start() -> None:
    cluster = Cluster().start()
    cluster.beat("step", 1, idle=100.0)
    assert cluster.job.stage == "run"


def test_a_stop_lets_ranks_save_and_a_second_kills_them() -> None:
    cluster = Cluster().start()
    stops = [c.message for c in cluster.job.request_stop(1.0) if isinstance(c, Send)]
    assert stops == [Stop(0, FaultConfig().stop_grace_s, save=True)] * 2
    stops = [c.message for c in cluster.job.request_stop(2.0) if isinstance(c, Send)]
    assert stops == [Stop(0, 0.0)] * 2
    for rank, node in enumerate("ab"):
        commands = cluster.send(node, RanksEnded(0, (RankEnd(rank, 143, 3.0, in_order=True, stopped=True),)))
    assert Finish(143) in commands
    assert not any(isinstance(c, Say) and "saving" in c.text for c in commands)


@pytest.mark.parametrize(
    ("trained", "requests", "wait_s", "said"),
    [
        (False, 1, 0.0, "stopped before the first step"),
        (True, 1, 60.0, "stopped: the ranks had not saved within fault.stop_grace_s = 60"),
        (True, 1, 1.0, "stopped: ranks 0, 1 failed before all had saved: the disk is full"),
        (True, 2, 0.0, "stopped at once, without saving"),
    ],
)
def test_a_stop_without_a_save_says_so(trained: bool, requests: int, wait_s: float, said: str) -> None:
    cluster = Cluster().start()
    if trained:
        cluster.beat("step", 1)
        cluster.beat("step", 2)
    for _ in range(requests):
        cluster.job.request_stop(cluster.now)
    cluster.now += wait_s
    commands = []
    for rank, node in enumerate("ab"):
        end = RankEnd(rank, -9, cluster.now, error="the disk is full" * rank, stopped=True)
        commands = cluster.send(node, RanksEnded(0, (end,)))
    assert said in [c.text for c in commands if isinstance(c, Say)]


def test_an_idle_agent_that_leaves_during_a_stop_is_not_started_again() -> None:
    cluster = Cluster().start()
    cluster.send("c", Hello("c", "c", "c", 1))
    cluster.job.request_stop(cluster.now)
    assert cluster.job.agent_ended("c", "status 143", cluster.now) == []


def test_a_save_that_fails_at_a_stop_is_the_status() -> None:
    cluster = Cluster().start()
    cluster.job.request_stop(1.0)
    cluster.send("a", RanksEnded(0, (RankEnd(0, 4, 2.0, error="disk full", exit_status=4, stopped=True),)))
    commands = cluster.send("b", RanksEnded(0, (RankEnd(1, 143, 2.0, in_order=True, stopped=True),)))
    assert Finish(4) in commands


def test_a_node_that_is_lost_while_the_job_gathers_is_replaced_at_once() -> None:
    plan = JobPlan("run", 2, 2, ("train",), "/logs", revivable=False)
    job = Job(plan, FaultConfig(), JobHistory(), 0.0)
    job.expect(["a", "b"], 0.0)
    for node in "abc":
        job.receive(node, Hello(node, node, node, 1), 0.0)
    job.receive("a", StoreOpened(0, "a:1"), 0.0)
    job.receive("a", RanksEnded(0, (RankEnd(0, -9, 1.0),)), 1.0)
    job.tick(2.0)
    job.roster.members["b"].held = True  # its checks take their time
    job.receive("b", RanksEnded(0, (RankEnd(1, -9, 2.0, stopped=True),)), 2.0)
    assert job.stage == "gather"
    job.agent_ended("b", "killed", 3.0)
    assert job.history.nodes == ("a", "c")


def history_of(cluster: Cluster) -> JobHistory:
    """Return what a new driver reads."""
    return cluster.job.history


def test_a_new_driver_takes_over_a_running_attempt() -> None:
    new = Cluster(history_of(Cluster().start()), takeover=True)
    for rank, node in enumerate("ab"):
        commands = new.send(node, Hello(node, node, node, 1, attempt=0, ranks=(rank,)))
        assert not any(isinstance(c, Send) and isinstance(c.message, Start | Stop) for c in commands)
    new.tick(1.0)
    assert new.job.stage == "run"
    assert new.job.history.attempt == 0


def test_a_new_driver_hears_of_a_rank_that_ended_meanwhile() -> None:
    new = Cluster(history_of(Cluster().start()), takeover=True)
    new.send("a", Hello("a", "a", "a", 1, attempt=0, ranks=(0,)))
    new.send("b", Hello("b", "b", "b", 1, attempt=0, ranks=()))
    new.send("b", RanksEnded(0, (RankEnd(1, -9, 1.0),)))
    new.tick(1.0)
    new.tick(1.0)
    assert new.job.history.incidents[1].culprit.ranks == (1,)


@pytest.mark.parametrize("last_beat", [True, False])
def test_a_new_driver_takes_the_step_that_the_ranks_report_not_the_log_s(last_beat: bool) -> None:
    """Also if no rank is left to report it when the driver has started."""
    new = Cluster(history_of(Cluster().start()), takeover=True)
    new.send("a", Hello("a", "a", "a", 1, attempt=0, ranks=(0,)))
    if last_beat:
        new.beat("step", 38, nodes="a")
    lost = {"error": "lost", "peer_lost": True, "step": 38}
    new.send("a", RanksEnded(0, (RankEnd(0, 1, 1.5, **lost),)))
    new.send("b", Hello("b", "b", "b", 1, attempt=0, ranks=()))
    new.send("b", RanksEnded(0, (RankEnd(1, -9, 1.0, step=37),)))
    new.tick(1.0)
    new.tick(1.0)
    incident = new.job.history.incidents[1]
    assert (incident.culprit.ranks, incident.step) == ((1,), 37)
    new.send("a", RanksEnded(0, (RankEnd(0, 1, 1.5, **lost),)))
    new.send("a", StoreOpened(1, "a:1"))
    new.beat("step", 31, attempt=1)
    new.beat("step", 32, attempt=1)
    assert new.job.history.incidents[1].steps_lost == 7


@pytest.mark.parametrize("told", [1, 2])
def test_a_new_driver_does_not_wait_for_an_agent_that_is_known_to_have_ended(told: int) -> None:
    """The scheduler may tell it twice: as a node without an agent, and as the end of one."""
    new = Cluster(history_of(Cluster().start()), takeover=True)
    new.send("a", Hello("a", "a", "a", 1, attempt=0, ranks=(0,)))
    for _ in range(told):
        new.job.agent_ended("b", "its agent ended, killed by signal 9", new.now)
    commands = new.tick(SETTLE_S) + new.tick(SETTLE_S)
    incident = new.job.history.incidents[1]
    assert incident.what == "node b was lost: its agent ended, killed by signal 9"
    assert Send("a", Stop(0, FaultConfig().end_grace_s)) in commands
    commands = new.send("a", RanksEnded(0, (RankEnd(0, -9, 3.0, stopped=True),)))
    assert StartAgent("b", 0.0) in commands, "at once"


def test_a_rank_that_was_killed_or_stopped_beside_another_fault_is_no_consequence() -> None:
    def incident(*ends: RankEnd, stopped: bool = False, lost: bool = False) -> Incident:
        cluster = Cluster().start()
        if stopped:
            cluster.send("b", Heartbeat(cluster.now, 0, (RankStatus(1, 1, "step", 1, state="T"),)))
        for end in ends:
            cluster.send("ab"[end.rank], RanksEnded(0, (end,)))
        if lost:
            cluster.job.agent_ended("b", "its agent ended", cluster.now + 2.0)
        cluster.tick(SETTLE_S)
        return cluster.job.history.incidents[1]

    killed, error = RankEnd(0, -9, 1.0), RankEnd(0, 1, 1.0, error="boom", error_kind="RuntimeError")
    found = incident(error, RankEnd(1, -9, 1.2))
    assert found.what == "rank 0 on a failed: RuntimeError: boom; rank 1 on b was killed by SIGKILL"
    assert (found.culprit, found.followers) == (Culprit((0, 1), ("a", "b")), ())
    found = incident(killed, stopped=True)
    assert found.what.startswith("rank 0 on a was killed by SIGKILL; rank 1 on b is stopped (SIGSTOP")
    assert found.culprit.ranks == (0, 1)
    found = incident(replace(killed, time=3.0), lost=True)
    assert found.what == "node b was lost: its agent ended; rank 0 on a was killed by SIGKILL"
    assert (found.culprit, found.followers) == (Culprit((0, 1), ("b",)), ()), "b alone is to be replaced"
    found = incident(killed, lost=True)
    assert found.what == "rank 0 on a was killed by SIGKILL; rank 1 on b was lost: its agent ended"


def test_a_stopped_rank_beside_lost_peers_is_the_cause_not_the_network() -> None:
    cluster = Cluster().start()
    cluster.send("b", Heartbeat(cluster.now, 0, (RankStatus(1, 1, "step", 1, state="T"),)))
    cluster.send("a", RanksEnded(0, (RankEnd(0, 1, 1.0, error="lost", peer_lost=True, peers=(1,)),)))
    while not cluster.job.history.incidents:
        cluster.send("a", Heartbeat(cluster.now))
        cluster.send("b", Heartbeat(cluster.now, 0, (RankStatus(1, 1, "step", 1, state="T"),)))
        cluster.tick(1.0)
    found = cluster.job.history.incidents[1]
    assert (found.class_, found.culprit, found.followers) == ("hang", Culprit((1,), ("b",)), (0,))
    assert found.what.startswith("rank 1 on b is stopped (SIGSTOP")


@pytest.mark.parametrize("again", [False, True])
def test_a_new_driver_stops_the_ranks_as_their_agents_join(again: bool) -> None:
    """Agents that got the signal too wait seconds for its order."""
    new = Cluster(history_of(Cluster().start()), takeover=True)
    order = Send("a", Stop(0, FaultConfig().stop_grace_s, save=True))
    new.send("a", Hello("a", "a", "a", 1, attempt=0, ranks=(0,)))
    assert new.job.request_stop(new.now) == [order]
    if again:
        order = Send("a", Stop(0, 0.0))
        assert new.job.request_stop(new.now) == [order]
    assert replace(order, node="b") in new.send("b", Hello("b", "b", "b", 1, attempt=0, ranks=(1,)))
    sent = [c for c in new.tick(SETTLE_S) if isinstance(c, Send)]
    assert sent == [order, replace(order, node="b")] and new.job.stage == "stop"


@pytest.mark.parametrize("driver_first", [False, True])
def test_a_stop_signal_to_all_nodes_is_one_request_and_one_to_some_is_theirs(driver_first: bool) -> None:
    """The supervisor may pass on what the agents of all nodes have told."""
    cluster = Cluster().start()
    cluster.send("c", Hello("c", "c", "c", 1))  # a spare
    beat = Heartbeat(cluster.now, 0, (RankStatus(0, 1, "step", 1),), signalled=True)
    told = [*cluster.send("a", beat), *cluster.send("b", replace(beat, ranks=(RankStatus(1, 1, "step", 1),)))]
    assert not told
    stops = [Send(node, Stop(0, FaultConfig().stop_grace_s, save=True)) for node in "ab"]
    for first in (driver_first, not driver_first):
        told = cluster.job.request_stop(cluster.now) if first else cluster.send("c", Heartbeat(0.0, signalled=True))
        assert [c for c in told if isinstance(c, Send)] == stops
        stops = []
    assert cluster.job.stop_requests == 1
    cluster.job.request_stop(cluster.now)
    assert cluster.job.stop_requests == 2


def test_a_new_driver_carries_out_the_last_decision() -> None:
    old = Cluster().start()
    old.send("b", RanksEnded(0, (RankEnd(1, -9, 1.0),)))
    old.tick(1.0)
    assert old.job.stage == "stop"
    new = Cluster(old.job.history, takeover=True)
    new.send("a", Hello("a", "a", "a", 1, attempt=0, ranks=(0,)))
    commands = new.send("b", Hello("b", "b", "b", 1)) + new.tick(1.0)
    assert [c.node for c in commands if isinstance(c, Send) and isinstance(c.message, Stop)] == ["a", "b"]
    new.send("a", RanksEnded(0, (RankEnd(0, -9, 3.0, stopped=True),)))
    assert new.job.history.attempt == 1
    assert len(new.job.history.incidents) == 1


def test_an_agent_that_was_partitioned_away_is_told_to_end_its_old_ranks() -> None:
    cluster = Cluster().start()
    commands = cluster.send("c", Hello("c", "c", "c", 1, attempt=7, ranks=(1,)))
    assert Send("c", Stop(7, 0.0)) in commands


@pytest.mark.parametrize("save", [False, True])
def test_a_node_whose_connection_was_away_is_told_again_to_end_its_ranks(save: bool) -> None:
    cluster, settings = Cluster().start(), FaultConfig()
    cluster.job.disconnected("b", cluster.now)
    if save:
        cluster.job.request_stop(cluster.now)
    else:
        cluster.send("a", RanksEnded(0, (RankEnd(0, -9, 1.0),)))
        cluster.tick(SETTLE_S)
    grace_s = settings.stop_grace_s - 1.5 if save else settings.end_grace_s
    hello = Hello("b", "b", "b", 1, attempt=0, ranks=(1,))
    commands = cluster.send("b", hello, after=1.5)
    assert [c.message for c in commands if isinstance(c, Send)][1:] == [Stop(0, grace_s, save)]
    again = [c.message for c in cluster.send("b", hello) if isinstance(c, Send)][1:]
    assert again == [Stop(0, grace_s, save)], "it gives the order to its ranks once"
    for rank, node in enumerate("ab"):
        cluster.send(node, RanksEnded(0, (RankEnd(rank, -9, cluster.now, stopped=True),)))
    assert cluster.job.stage == (Stage.DONE if save else Stage.OPEN)


@pytest.mark.parametrize("stage", [Stage.SETTLE, Stage.STOP, Stage.GATHER])
def test_a_lost_node_that_comes_back_with_its_ranks_is_told_to_end_them(stage: Stage) -> None:
    cluster = Cluster().start()
    cluster.now += 7.0
    cluster.beat("step", 2, nodes="a")
    cluster.tick(0.0)
    assert list(cluster.job.attempt.lost) == ["b"]
    if stage is not Stage.SETTLE:
        cluster.tick(SETTLE_S)
    if stage is Stage.GATHER:
        cluster.send("a", RanksEnded(0, (RankEnd(0, -9, cluster.now, stopped=True),)))
    assert cluster.job.stage == stage
    commands = cluster.send("b", Hello("b", "b", "b", 1, attempt=0, ranks=(1,)))
    assert Send("b", Stop(0, FaultConfig().end_grace_s)) in commands
    cluster.send("b", RanksEnded(0, (RankEnd(1, -9, cluster.now, stopped=True),)))
    cluster.tick(SETTLE_S)
    cluster.send("a", RanksEnded(0, (RankEnd(0, -9, cluster.now, stopped=True),)))
    assert cluster.job.history.attempt == 1
    assert not cluster.job.history.excluded


def test_a_node_whose_ranks_cannot_be_ended_leaves_the_job() -> None:
    cluster = Cluster().start()
    cluster.send("a", RanksEnded(0, (RankEnd(0, -9, 1.0),)))
    cluster.tick(1.0)
    cluster.send("b", RanksEnded(0, (), stuck=(1,)))
    assert "b" in cluster.job.history.excluded


@pytest.mark.parametrize("spares", [0, 1])
def test_the_loss_of_an_idle_node_disturbs_nobody(spares: int) -> None:
    cluster = Cluster().start()
    cluster.send("c", Hello("c", "c", "c", 1))
    commands = cluster.job.agent_ended("c", "status 1", cluster.now)
    assert cluster.job.stage == "run"
    assert commands == [Say("idle node c was lost: status 1; its agent is started again"), StartAgent("c")]


def test_a_job_that_is_stopped_without_ranks_says_so() -> None:
    job = Job(PLAN, FaultConfig(), JobHistory(), 0.0)
    assert job.stage == Stage.GATHER
    assert [c.text for c in job.request_stop(1.0) if isinstance(c, Say)] == ["stopping: no ranks run"]
    assert job.request_stop(2.0) == []


def test_a_launch_without_incidents_of_its_own_names_none() -> None:
    cluster = Cluster().start()
    assert summary(cluster.job) == "0 incidents, the last attempt was 0"
    cluster.send("a", RanksEnded(0, (RankEnd(0, -9, 1.0),)))
    cluster.job.tick(cluster.now + 2.0)
    assert summary(cluster.job) == "1 incident (1 restart), the last attempt was 0"


def job_that_lost_b(plan: JobPlan) -> Job:
    """Return a job of three nodes that may shrink, after the verdict about the loss of node b."""
    job = Job(plan, FaultConfig(shrink=True), JobHistory(), 0.0)
    job.expect(["a", "b", "c"], 0.0)
    for node in "abc":
        job.receive(node, Hello(node, node, node, 1), 0.0)
    job.receive("a", StoreOpened(0, "a:1"), 0.0)
    job.agent_ended("b", "killed", 1.0)
    job.tick(2.0)
    return job


def test_without_a_spare_the_layout_shrinks_and_a_new_driver_knows_it() -> None:
    smaller = lambda nodes: SmallerLayout(nodes, nodes, (f"parallel.dp={nodes}",))  # noqa: E731
    plan = JobPlan("run", 3, 3, ("train", "parallel.dp=3"), "/logs", revivable=False, smaller=smaller)
    job = job_that_lost_b(plan)
    assert job.history.incidents[1].action.kind == "shrink"
    for rank, node in ((0, "a"), (2, "c")):
        job.receive(node, RanksEnded(0, (RankEnd(rank, -9, 2.0, stopped=True),)), 2.0)
    started = [c.message for c in job.receive("a", StoreOpened(1, "a:2"), 3.0) if isinstance(c, Send)]
    assert [(order.ranks, order.world) for order in started] == [((0,), 2), ((1,), 2)]
    assert started[0].arguments == ("train", "parallel.dp=3", "parallel.dp=2")
    new = Job(plan, FaultConfig(), job.history, 4.0)
    assert (new.plan.nodes, new.plan.world, new.plan.overrides) == (2, 2, ("parallel.dp=2",))


def test_a_job_that_cannot_shrink_any_more_when_its_ranks_have_ended_stops() -> None:
    smaller = lambda nodes: SmallerLayout(2, 2, ("parallel.dp=2",)) if nodes == 2 else None  # noqa: E731
    plan = JobPlan("run", 3, 3, ("train",), "/logs", revivable=False, smaller=smaller)
    job = job_that_lost_b(plan)
    job.receive("a", RanksEnded(0, (RankEnd(0, -9, 2.0, stopped=True),)), 2.0)
    job.receive("c", RanksEnded(0, (), stuck=(2,)), 2.0)
    assert [one.action.kind for one in job.history.incidents.values()] == ["shrink", "stop"]
    assert job.history.ended == Exit.DO_NOT_REQUEUE
