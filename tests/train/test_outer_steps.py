"""Training across sites: its equality with data parallelism, and sites that are lost and come back."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.core.errors import Exit, LostPeerError
from megascale.operate.channel.secret import SECRET_VARIABLE
from megascale.train import outer_steps
from megascale.train.outer_steps import Sites
from megascale.train.resume import load_initial_state
from megascale.train.step import train_step
from tests.jobs import Job, job_config
from tests.marks import only_quick
from tests.operate.driver.launched import LaunchedJob
from tests.optim.layouts import SMALL, configuration
from tests.site_jobs import SECRET, meeting_point, run_sites
from tests.thread_world import run_threads

PLAIN = {"optimizer__betas": [0.0, 0.95], "optimizer__eps": 1e10, "optimizer__lr": 1e9, "optimizer__weight_decay": 0.0,
         "optimizer__clip_norm": 0.0, "optimizer__warmup_steps": 0, "optimizer__decay": "constant"}  # fmt: skip
"""AdamW whose update is the gradient times 0.1, to 1e-10: plain SGD."""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with meeting_point() as found:
        yield found


def site_configs(folder: Path, address: str, count: int = 2, **keys: Any) -> list[Any]:
    return [
        configuration(
            folder / f"site{index}", {"name": "adamw"}, SMALL,
            **{"sites__count": count, "sites__index": index, "sites__address": address, **keys},
        )
        for index in range(count)
    ]  # fmt: skip


def train(run: Any, until: int) -> Tensor:
    """Train with outer steps; return the master weights."""
    while run.progress.step < until:
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        if run.sites is not None:
            run.sites.step_ends(run, result)
    run.buffers.finish_param_gather()
    return torch.cat([shard.master for shard in run.optimizer.shards]).clone()


@pytest.mark.parametrize("count", only_quick([2, 3], 3))
def test_an_outer_step_after_every_step_is_data_parallelism(count: int, address: str, tmp_path: Path) -> None:
    """With a plain inner rule, and an outer one of lr 1 without momentum: to the rounding of sums in fp64."""
    outer = {"sites__every": 1, "sites__lr": 1.0, "sites__momentum": 0.0}
    sites = run_sites(site_configs(tmp_path, address, count, **PLAIN, **outer), lambda run: train(run, 4))
    config = configuration(tmp_path, {"name": "adamw"}, SMALL, **{**PLAIN, "batch__global": 8 * count})
    (alone,) = run_threads(config, lambda run: train(run, 4))
    for weights in sites:
        assert torch.equal(weights, sites[0])
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-10)


WAYS: list[dict[str, Any]] = [
    {},
    {"sites__top_k": 0.05, "sites__bits": 2},
    {"sites__fragments": 2},
    {"sites__fragments": 2, "sites__top_k": 0.05, "sites__bits": 2},
    {"sites__fragments": 2, "sites__overlap": 1, "sites__bits": 8},
]


@pytest.mark.parametrize(
    "keys",
    only_quick(WAYS, *WAYS[-2:]),
    ids=["diloco", "sparse", "fragments", "sparse fragments", "overlap"],
)
def test_sites_end_as_one_model(keys: dict[str, Any], address: str, tmp_path: Path) -> None:
    """They train on different samples, and take the same outer steps; an outer step follows the last step."""
    configs = site_configs(tmp_path, address, **{"sites__every": 4, **keys})
    first, second = run_sites(configs, lambda run: (train(run, 5), train(run, 10)))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_what_sites_send_is_traffic_of_the_steps(address: str, tmp_path: Path) -> None:
    """Once for each outer step: the bytes of all sites, and the time that training waits for it."""

    def traffic(run: Any) -> tuple[Any, int]:
        train(run, 5)
        return run.mesh.recorder.take_traffic()["sites"], run.outer.pseudo_gradient([0]).payload.nbytes

    for sent, nbytes in run_sites(site_configs(tmp_path, address, sites__every=2), traffic):
        assert sent.calls == 2 and sent.bytes == 2 * 2 * nbytes and sent.exposed_s > 0


def test_a_failed_exchange_changes_nothing_and_is_tried_again(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = site_configs(tmp_path, address, sites__every=2)
    expected = run_sites(configs, lambda run: train(run, 4))
    gather, failed = outer_steps._gather, threading.Event()

    def fail_once(group: Any, part: Tensor, label: str) -> Any:
        result = gather(group, part, label)
        if group.index == 1 and not failed.is_set():
            failed.set()
            raise LostPeerError("the other end closed the connection", peers=[0])
        return result

    monkeypatch.setattr(outer_steps, "_gather", fail_once)
    with meeting_point() as another:
        retried = [config.model_copy(update={"sites": config.sites.model_copy(update={"address": another})})
                   for config in configs]  # fmt: skip
        found = run_sites(retried, lambda run: train(run, 4))
    assert failed.is_set() and all(map(torch.equal, found, expected))


def test_an_exchange_that_fails_in_the_background_is_tried_again(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the foreground, when it should have arrived: the next one has not begun."""
    gather, waited = outer_steps._gather, list[int]()

    class Failing:
        def wait(self) -> None:
            waited.append(1)
            raise LostPeerError("the other end closed the connection", peers=[0])

    def fail_once(group: Any, part: Tensor, label: str) -> Any:
        out, work = gather(group, part, label)
        return (out, Failing()) if group.index == 1 and not waited else (out, work)

    monkeypatch.setattr(outer_steps, "_gather", fail_once)
    configs = site_configs(tmp_path, address, sites__every=4, sites__fragments=2, sites__overlap=1)
    first, second = run_sites(configs, lambda run: train(run, 10))
    assert waited == [1] and torch.equal(first, second)


def resumed_state(run: Any) -> dict[str, Tensor]:
    tensors = run.outer.global_tensors()
    return {f"{name}@{shard.offset}": shard.data.clone() for name, t in tensors.items() for shard in t.shards}


def test_the_outer_state_is_in_checkpoints(address: str, tmp_path: Path) -> None:
    """A site that resumes has the outer weights, momentum and residual that it had."""
    keys = {"sites__top_k": 0.1, "sites__momentum": 0.0, "sites__bits": 8, "sites__every": 2, "checkpoint__every": 100}
    configs = site_configs(tmp_path, address, **keys)

    def kept(run: Any) -> dict[str, Tensor]:
        train(run, 5)
        run.checkpoints.save(run.progress)
        return resumed_state(run)

    saved = run_sites(configs, kept)
    for config, state in zip(configs, saved, strict=True):

        def load(run: Any) -> dict[str, Tensor]:
            load_initial_state(run, lambda folder: pytest.fail(str(folder)))
            run.outer.begin()
            return resumed_state(run)

        (found,) = run_threads(config, load)
        assert found.keys() == state.keys() and len(found) > 2
        assert all(torch.equal(found[name], values) for name, values in state.items())


def test_a_site_that_returns_has_the_weights_of_the_others(address: str, tmp_path: Path) -> None:
    """One trains alone until the other, which begins with fresh weights, waits for it."""
    stays, returns = site_configs(tmp_path, address, sites__every=2, sites__grace_s=0.1)
    trains_alone = threading.Event()

    def join(run: Any) -> None:
        run.sites = Sites(run)
        run.sites._meetings._settings = run.config.sites.model_copy(update={"grace_s": 600.0})  # patient from here on

    def stay(run: Any) -> Tensor:
        join(run)
        train(run, 3)
        trains_alone.set()
        meetings = run.sites._meetings
        key = f"{meetings.number}/present"
        while not (meetings.store.check([key]) and b'"site": 1' in meetings.store.get(key)):
            time.sleep(0.01)
        return train(run, 8)

    def come_back(run: Any) -> tuple[int, Tensor]:
        trains_alone.wait()
        join(run)
        return run.progress.step, train(run, 8)

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.submit(run_threads, stays, stay), threads.submit(run_threads, returns, come_back)
    (weights,), ((step, same),) = one.result(), other.result()
    assert step == 4 and torch.equal(weights, same)


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[str]:
    """Run `megascale sites`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megascale", "sites", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True,
        env=os.environ | {SECRET_VARIABLE: SECRET},
    )  # fmt: skip
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def site_config(folder: Path, address: str, index: int, *, steps: int, **keys: Any) -> Path:
    return job_config(
        folder / f"site{index}", SMALL, train__steps=steps, sites__count=2, sites__address=address, sites__index=index,
        sites__every=5, checkpoint__every=5, **keys,
    )  # fmt: skip


def start_site(folder: Path, address: str, index: int, *, steps: int, **keys: Any) -> Job:
    return Job(site_config(folder, address, index, steps=steps, **keys), env={SECRET_VARIABLE: SECRET})


@pytest.mark.slow
def test_two_jobs_train_one_model(meeting: str, tmp_path: Path) -> None:
    """Each of two ranks, with sharded optimizers."""
    jobs = [start_site(tmp_path, meeting, index, steps=12, parallel__dp=2) for index in range(2)]
    ends = [job.end() for job in jobs]
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert "2 of 2 sites train" in ends[0][2]
    losses = [[record["loss"] for record in job.steps()] for job in jobs]
    assert len(losses[0]) == len(losses[1]) == 12 and losses[0] != losses[1]
    sent = {record["step"]: record["communication"]["sites"] for record in jobs[0].steps()
            if "sites" in record["communication"]}  # fmt: skip
    assert list(sent) == [6, 11], "the records of the steps after outer steps"
    assert all(traffic["calls"] == 1 and traffic["exposed_s"] > 0 for traffic in sent.values())


@pytest.mark.slow
def test_a_site_is_killed_and_comes_back(meeting: str, tmp_path: Path) -> None:
    """The other goes on without it, and the one that returns goes on from the other's step, not from its checkpoint."""
    stays, dies = (start_site(tmp_path, meeting, index, steps=10**6) for index in range(2))
    dies.wait_for_step(10)
    dies.kill()
    killed = max(record["step"] for record in dies.steps())
    stays.wait_for_step(killed + 20)
    back = start_site(tmp_path, meeting, 1, steps=10**6)
    back.wait_for_step(killed + 30)
    stays.wait_for_step(max(record["step"] for record in back.steps()) + 5)  # they meet again
    ends = []
    for job in (stays, back):
        job.signal(signal.SIGTERM)
        ends.append(job.end())
    assert [status for status, _, _ in ends] == [Exit.STOPPED] * 2, ends
    assert "1 of 2 sites train, without 1" in ends[0][1] and "".join(ends[0][1:]).count("2 of 2 sites train") == 2
    steps = [record["step"] for record in back.steps()]
    assert any(after > before + 15 for before, after in itertools.pairwise(steps))


@pytest.mark.slow
def test_a_driver_brings_its_site_back(meeting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site is a `megascale launch` of two nodes, one of which loses a rank: its driver restarts the site, which
    goes on from the other's step.
    """
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    configs = (site_config(tmp_path, meeting, index, steps=10**6, parallel__dp=2) for index in range(2))
    stays, dies = (LaunchedJob(config, "--nodes", "2") for config in configs)
    for job in (stays, dies):
        job.wait_for_step(10)
    os.kill(dies.pid("rank", rank=1), signal.SIGKILL)
    dies.wait_for_recovery()
    (incident,) = dies.history.incidents.values()
    stays.wait_until(lambda: stays.output().count("2 of 2 sites train") == 2, "both sites train again")
    ends = []
    for job in (stays, dies):
        job.signal(signal.SIGTERM)
        ends.append(job.end())
    assert [status for status, _, _ in ends] == [Exit.STOPPED] * 2, ends
    assert "1 of 2 sites train, without 1" in ends[0][1] and not stays.history.incidents
    steps = [record["step"] for record in dies.steps()]
    assert any(before <= incident.step < after - 15 for before, after in itertools.pairwise(steps))
