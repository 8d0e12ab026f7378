"""Manifests of JobSets: valid by the public API, and each end of a container has the action that the page names."""

from __future__ import annotations

import asyncio
import copy
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megascale.cli.main import main
from megascale.core.errors import Exit
from megascale.operate.driver.scheduler.adapters import ADAPTERS
from megascale.operate.driver.scheduler.jobset import JobSetPlan, driver_endpoint, manifest
from megascale.operate.driver.scheduler.none import NoScheduler
from megascale.operate.driver.scheduler.port import SchedulerError
from tests.jobs import job_config
from tests.operate.driver.scheduler.jobset_schema import JOBSET, SECRET, mistakes, webhook_mistakes
from tests.runs import GPT

PLAN = JobSetPlan(
    "llama-7b", "registry/megascale:1", 4, 1, ["a.toml", "name=x: y", "--nodes", "4", "--spares", "1"], "runs", "/work",
    "5" * 64, gpus=8,
)  # fmt: skip


def documents(plan: JobSetPlan = PLAN) -> tuple[dict[str, Any], dict[str, Any]]:
    secret, jobset = yaml.safe_load_all(manifest(plan))
    return secret, jobset


def pods(jobset: dict[str, Any]) -> dict[str, dict[str, Any]]:
    jobs = jobset["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}


@pytest.mark.parametrize("run", ["llama-7b", "Llama_70b.1", "175b", "x" * 128, "a-._b"])
def test_the_manifest_is_valid(run: str) -> None:
    secret, jobset = documents(replace(PLAN, run=run, gpus=0))
    assert not [*mistakes(secret, SECRET), *mistakes(jobset, JOBSET), *webhook_mistakes(jobset)]


def test_the_schema_finds_mistakes() -> None:
    _, good = documents()
    for path, value, what in (
        ("spec.failurePolicy.restartStrategy", "InPlace", "is none of"),
        ("spec.failurePolicy.maxRestarts", "3", "is no"),
        ("spec.replicas", 3, "unknown key"),
    ):
        bad = copy.deepcopy(good)
        *parents, key = path.split(".")
        target = bad
        for parent in parents:
            target = target[parent]
        target[key] = value
        (found,) = mistakes(bad, JOBSET)
        assert what in found
    bad = copy.deepcopy(good)
    pods(bad)["driver"]["restartPolicy"] = "OnFailure"
    assert list(webhook_mistakes(bad)) == ["podFailurePolicy needs restartPolicy Never"]


def test_a_pod_for_the_driver_and_one_for_each_node_and_spare() -> None:
    secret, jobset = documents()
    jobs = {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
    assert {name: job["completions"] for name, job in jobs.items()} == {"driver": 1, "agent": 5}
    driver, agent = (pods(jobset)[name]["containers"][0] for name in ("driver", "agent"))
    assert driver["command"][2:] == ["megascale", "launch", *PLAN.arguments, "--scheduler", "jobset"]
    assert agent["command"][1:] == ["-m", "megascale", "agent"]
    assert agent["resources"] == {"limits": {"nvidia.com/gpu": 8}} and "resources" not in driver
    variables = {variable["name"]: variable for variable in agent["env"]}
    assert variables["MEGASCALE_DRIVER"]["value"] == "llama-7b-driver-0-0.llama-7b:29400"
    assert variables["MEGASCALE_NODE"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    reference = variables["MEGASCALE_JOB_SECRET"]["valueFrom"]["secretKeyRef"]
    assert reference["name"] == secret["metadata"]["name"] and secret["stringData"] == {reference["key"]: "5" * 64}
    assert "5" * 64 not in str(jobset)


def test_the_command_writes_a_manifest_that_only_its_owner_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output = job_config(tmp_path, GPT, parallel__dp=4, fault__stop_grace_s=90), tmp_path / "manifest.yaml"
    (topology := tmp_path / "topology.conf").write_text("SwitchName=a Nodes=n[0-2]")
    words = ["launch", str(config), "train.steps=7", "--nodes", "2", "--spares", "1", "--scheduler", "jobset"]
    words += ["--topology", str(topology)]
    assert main([*words, "--image", "i:1", "--claim", "runs=/work", "--output", str(output)]) == Exit.OK
    assert "kubectl apply" in capsys.readouterr().out
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    secret, jobset = yaml.safe_load_all(output.read_text())
    assert not [*mistakes(secret, SECRET), *mistakes(jobset, JOBSET), *webhook_mistakes(jobset)]
    driver = pods(jobset)["driver"]
    command = driver["containers"][0]["command"]
    assert command[3:6] == ["launch", str(config), "train.steps=7"]
    assert command[command.index("--topology") + 1] == str(topology)
    assert driver["terminationGracePeriodSeconds"] > 90, "time to save"
    assert main([*words, "--output", str(output)]) == Exit.CONFIG
    assert "--image" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--gpus-per-node", "8"], ["--image", "i:1"], ["--claim", "runs=/work"]])
@pytest.mark.parametrize("scheduler", ["local", "jobset"])
def test_an_option_of_a_manifest_without_one(
    option: list[str], scheduler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", str(job_config(tmp_path, GPT)), "--nodes", "1", "--scheduler", scheduler, *option]
    assert main(words) == Exit.CONFIG
    err = capsys.readouterr().err
    assert f"{option[0]}: has no effect without a manifest (--scheduler {scheduler})  -> leave it out, or" in err


def test_errors_that_would_recur_fail_the_job_set() -> None:
    _, jobset = documents()
    policy = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]

    def action(status: int, disrupted: bool = False) -> str:
        for rule in policy:
            if "onExitCodes" in rule and status in rule["onExitCodes"]["values"]:
                return rule["action"]
            if "onPodConditions" in rule and disrupted:
                return rule["action"]
        return "Count"

    for status in (Exit.CONFIG, Exit.DATA, Exit.CHECKPOINT, Exit.DO_NOT_REQUEUE):
        assert action(status) == action(status, disrupted=True) == "FailJob"
    for status in (Exit.UNCLASSIFIED, Exit.STOPPED, 137):
        assert action(status) == "Count", "another pod"
    assert action(Exit.STOPPED, disrupted=True) == "Ignore"
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["driver"]


def test_the_copies_of_an_agent_outlive_its_container() -> None:
    _, jobset = documents()
    agent = pods(jobset)["agent"]
    assert agent["restartPolicy"] == "OnFailure", "the same pod, with its volumes"
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in agent["volumes"]
    (rule,) = agent["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname", "one agent on a node"


def test_the_driver_in_its_pod() -> None:
    env = {"MEGASCALE_NODE_ADDRESS": "10.1.2.3", "MEGASCALE_DRIVER": PLAN.driver}
    assert driver_endpoint(env) == ("10.1.2.3", 29400)
    with pytest.raises(SchedulerError, match="no pod of a JobSet"):
        driver_endpoint({})
    assert ADAPTERS["jobset"].driver_endpoint is driver_endpoint

    async def use() -> None:
        scheduler = NoScheduler()
        assert not await scheduler.nodes() and not await scheduler.request(3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scheduler.next_end(), 0.05)

    asyncio.run(use())
