"""Kubernetes: the manifest of a run as a JobSet, inside of whose pods there is no scheduler (`scheduler.none`).

The JobSet has a pod for the driver, and an agent in each of N + K further pods, spares included, each on a node of its
own. Kubernetes restarts containers in place and replaces lost pods; which pods train is the driver's decision.

| end of a container | action |
|---|---|
| the driver: 0 | the JobSet has succeeded, agents are deleted |
| the driver: 2, 3, 4 or 93, an error that would recur | FailJob, and with it FailJobSet |
| the driver: anything else, such as 143, or a drained node | another pod, which reads the log of incidents |
| an agent | the same pod's container once more (its copies in memory stay); a lost pod is replaced |

Sources: jobset.x-k8s.io/v1alpha2 (0.11 and later, feature gate InPlaceRestart), batch/v1 podFailurePolicy.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megascale.core.errors import Exit
from megascale.core.rank import NODE_VARIABLE
from megascale.operate.channel.secret import SECRET_VARIABLE
from megascale.operate.driver.scheduler.port import (
    ADDRESS_VARIABLE,
    AGENT_COMMAND,
    DRIVER_VARIABLE,
    SLOTS_VARIABLE,
    SchedulerError,
)

DRIVER_PORT = 29400

RECURRING = tuple(sorted((Exit.CONFIG, Exit.DATA, Exit.CHECKPOINT, Exit.DO_NOT_REQUEUE)))
"""Exit statuses of the driver after which a restart would fail in the same way."""

NO_LIMIT = 2**31 - 1
"""Kubernetes' own limits of restarts are off: the budget is in the log of incidents, which outlives pods."""

_SECRET_KEY = "secret"
_LONGEST_NAME = 63 - len("-agent-0-99999-abcde")  # of a pod


@dataclass(frozen=True)
class JobSetPlan:
    """Values of a manifest. `run`: its name; `image`: has megascale for the program `python`; `arguments`: of
    `megascale launch` in the driver's pod, with the nodes; `claim`: name of a volume claim that all pods mount at
    `mount`, for the configuration, the data and the run; `grace_s`: seconds to save after a request to stop; `slots`:
    ranks of a node.
    """

    run: str
    image: str
    nodes: int
    spares: int
    arguments: Sequence[str]
    claim: str
    mount: str
    secret: str
    gpus: int = 0
    grace_s: int = 120
    python: str = "python3"
    slots: int = 0

    @property
    def name(self) -> str:
        """The name of the JobSet, of its service and of its secret: the run's, as a DNS label."""
        label = re.sub(r"[^a-z0-9]+", "-", self.run.lower()).strip("-")
        return (label if label[:1].isalpha() else f"run-{label}")[:_LONGEST_NAME].rstrip("-")

    @property
    def driver(self) -> str:
        """Host and port of the driver: pod 0 of job 0 of the replicated job `driver`."""
        return f"{self.name}-driver-0-0.{self.name}:{DRIVER_PORT}"


def manifest(plan: JobSetPlan) -> str:
    """Return the manifest, two YAML documents: the secret and the JobSet."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": plan.name},
        "type": "Opaque",
        "stringData": {_SECRET_KEY: plan.secret},
    }
    return "---\n".join(f"{_yaml(document)}\n" for document in (secret, jobset(plan)))


def jobset(plan: JobSetPlan) -> dict[str, Any]:
    """Return the JobSet as nested values."""
    launch = [plan.python, "-m", "megascale", "launch", *plan.arguments, "--scheduler", "jobset"]
    agent = [plan.python, *AGENT_COMMAND[1:]]
    gpus = {"resources": {"limits": {"nvidia.com/gpu": plan.gpus}}} if plan.gpus else {}
    driver = _pod(plan, "driver", launch, {}) | {"restartPolicy": "Never"}  # podFailurePolicy asks for it
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": plan.name},
        "spec": {
            # Names such as NAME-agent-0-3.NAME in a headless service, also of pods that are not ready.
            "network": {"enableDNSHostnames": True, "subdomain": plan.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["driver"]},
            "failurePolicy": {
                "maxRestarts": NO_LIMIT,
                "restartStrategy": "InPlaceRestart",
                "rules": [{"name": "recurs", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [
                {"name": "driver", "replicas": 1, "template": {"spec": _job(1, driver, _RULES)}},
                {
                    "name": "agent",
                    "replicas": 1,
                    "template": {"spec": _job(plan.nodes + plan.spares, _agent_pod(plan, agent, gpus), {})},
                },
            ],
        },
    }


_RULES = {
    "podFailurePolicy": {
        "rules": [
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": "driver", "operator": "In", "values": list(map(int, RECURRING))},
            },
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    }
}


def _job(pods: int, pod: dict[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Job of indexed pods, in the form that InPlaceRestart asks for."""
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": NO_LIMIT,
        "podReplacementPolicy": "Failed",
        **rules,
        "template": {"spec": pod},
    }


def _agent_pod(plan: JobSetPlan, command: list[str], resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return an agent's pod: one on a node, with the node's shared memory for copies of the state."""
    labels = {"jobset.sigs.k8s.io/jobset-name": plan.name, "jobset.sigs.k8s.io/replicatedjob-name": "agent"}
    others = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    pod = _pod(plan, "agent", command, resources)
    pod["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [others]}}
    return pod | {"restartPolicy": "OnFailure", "affinity": affinity}


def _pod(plan: JobSetPlan, name: str, command: list[str], resources: Mapping[str, Any]) -> dict[str, Any]:
    variables = [
        {"name": DRIVER_VARIABLE, "value": plan.driver},
        {"name": NODE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": ADDRESS_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": {"name": plan.name, "key": _SECRET_KEY}}},
    ]
    if plan.slots:
        variables.append({"name": SLOTS_VARIABLE, "value": str(plan.slots)})
    container = {
        "name": name,
        "image": plan.image,
        "command": command,
        "workingDir": plan.mount,
        "env": variables,
        "volumeMounts": [{"name": "shared", "mountPath": plan.mount}],
        **resources,
    }
    return {
        "terminationGracePeriodSeconds": plan.grace_s,
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": plan.claim}}],
    }


def _yaml(value: Any, indent: int = 0) -> str:
    """Format nested values as YAML in block style. Scalars are JSON, which is YAML."""
    space = "  " * indent
    if isinstance(value, Mapping) and value:
        nested = {key: isinstance(item, Mapping | list) and bool(item) for key, item in value.items()}
        after = {
            key: "\n" + _yaml(item, indent + 1) if nested[key] else f" {json.dumps(item)}"
            for key, item in value.items()
        }
        return "\n".join(f"{space}{key}:{text}" for key, text in after.items())
    if isinstance(value, list) and value:
        return "\n".join(f"{space}- {_yaml(item, indent + 1).lstrip()}" for item in value)
    return f"{space}{json.dumps(value)}"


def driver_endpoint(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the address of this pod and the port of the driver. Raises: SchedulerError outside of a JobSet's pod"""
    host, (_, _, port) = env.get(ADDRESS_VARIABLE), env.get(DRIVER_VARIABLE, "").rpartition(":")
    if not host or not port.isdecimal():
        hint = "--output FILE writes the manifest of a JobSet; kubectl apply -f FILE starts it"
        what = f"this is no pod of a JobSet: {ADDRESS_VARIABLE} or {DRIVER_VARIABLE} is not set"
        raise SchedulerError(what, hint=hint)
    return host, int(port)
