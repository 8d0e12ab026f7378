"""The part of the Kubernetes API that our manifests use, and a check of a manifest against it without a cluster.

After the CRD jobset.x-k8s.io/v1alpha2 of JobSet 0.13 (commit 08dfbdf) with the rules of its admission webhook, and
batch/v1 and core/v1 of Kubernetes 1.34. In a schema `str`, `int` and `bool` are types, a tuple is an enumeration, a
list an array, a dict an object; "key!" is a required key, "*" any key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

ENV = {
    "name!": str,
    "value": str,
    "valueFrom": {"fieldRef": {"fieldPath!": str}, "secretKeyRef": {"name": str, "key!": str, "optional": bool}},
}
CONTAINER = {
    "name!": str,
    "image": str,
    "command": [str],
    "args": [str],
    "workingDir": str,
    "env": [ENV],
    "resources": {"limits": {"*": (int, str)}, "requests": {"*": (int, str)}},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
ANTI_AFFINITY = {
    "requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"*": str}}, "topologyKey!": str}
    ]
}
POD = {
    "containers!": [CONTAINER],
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "terminationGracePeriodSeconds": int,
    "affinity": {"podAntiAffinity": ANTI_AFFINITY},
    "volumes": [
        {
            "name!": str,
            "emptyDir": {"medium": ("", "Memory"), "sizeLimit": (int, str)},
            "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
        }
    ],
}
POD_FAILURE_RULE = {
    "action!": ("FailJob", "FailIndex", "Ignore", "Count"),
    "onExitCodes": {"containerName": str, "operator!": ("In", "NotIn"), "values!": [int]},
    "onPodConditions": [{"type!": str, "status": ("True", "False", "Unknown")}],
}
JOB = {
    "completionMode": ("Indexed", "NonIndexed"),
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podReplacementPolicy": ("Failed", "TerminatingOrFailed"),
    "podFailurePolicy": {"rules!": [POD_FAILURE_RULE]},
    "template!": {"metadata": {"labels": {"*": str}, "annotations": {"*": str}}, "spec": POD},
}
ACTIONS = (
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)
FAILURE_RULE = {
    "name!": str,
    "action!": ACTIONS,
    "onJobFailureReasons": [
        ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy")
    ],
    "onJobFailureMessagePatterns": [str],
    "targetReplicatedJobs": [str],
}
JOBSET = {
    "apiVersion!": ("jobset.x-k8s.io/v1alpha2",),
    "kind!": ("JobSet",),
    "metadata!": {"name!": str, "namespace": str, "labels": {"*": str}, "annotations": {"*": str}},
    "spec!": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "successPolicy": {"operator!": ("All", "Any"), "targetReplicatedJobs": [str]},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart"),
            "rules": [FAILURE_RULE],
        },
        "replicatedJobs": [{"name!": str, "replicas": int, "groupName": str, "template!": {"spec!": JOB}}],
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
}
SECRET = {
    "apiVersion!": ("v1",),
    "kind!": ("Secret",),
    "metadata!": {"name!": str},
    "type": str,
    "stringData": {"*": str},
}

MAX_INT32 = 2**31 - 1
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS label by RFC 1035."""


def mistakes(value: Any, schema: Any, where: str = "") -> Iterator[str]:
    """What is wrong with a value by a schema, with its place."""
    if isinstance(schema, dict):
        yield from _object_mistakes(value, schema, where)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{where}: no array"
            return
        for index, item in enumerate(value):
            yield from mistakes(item, schema[0], f"{where}[{index}]")
    elif isinstance(schema, tuple) and isinstance(schema[0], str):
        if value not in schema:
            yield f"{where}: {value!r} is none of {schema}"
    elif not isinstance(value, schema) or (isinstance(value, bool) and schema is not bool):
        yield f"{where}: {value!r} is no {schema}"


def _object_mistakes(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where}: no object"
        return
    known = {key.rstrip("!"): each for key, each in schema.items()}
    for key in schema:
        if key.endswith("!") and key[:-1] not in value:
            yield f"{where}: no {key[:-1]}"
    for key, item in value.items():
        if key in known or "*" in known:
            yield from mistakes(item, known.get(key, known.get("*")), f"{where}.{key}")
        else:
            yield f"{where}: unknown key {key}"


def webhook_mistakes(jobset: dict[str, Any]) -> Iterator[str]:
    """What the admission webhook of JobSet and the validation of Jobs refuse."""
    spec, name = jobset["spec"], jobset["metadata"]["name"]
    jobs = {job["name"]: job for job in spec["replicatedJobs"]}
    if not LABEL.fullmatch(spec["network"]["subdomain"]):
        yield f"subdomain {spec['network']['subdomain']}"
    for rule in (spec["successPolicy"], *spec["failurePolicy"]["rules"]):
        yield from (f"no job {job}" for job in rule.get("targetReplicatedJobs", ()) if job not in jobs)
    names = [rule["name"] for rule in spec["failurePolicy"]["rules"]]
    if len(set(names)) < len(names) or not all(
        re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", n) for n in names
    ):
        yield f"names of rules {names}"
    for job in jobs.values():
        batch = job["template"]["spec"]
        longest = f"{name}-{job['name']}-{job['replicas'] - 1}-{batch['completions'] - 1}-abcde"
        if not LABEL.fullmatch(longest):
            yield f"name of a pod {longest}"
        if spec["failurePolicy"]["restartStrategy"] == "InPlaceRestart":
            in_place = {
                "backoffLimit": MAX_INT32,
                "podReplacementPolicy": "Failed",
                "parallelism": batch["completions"],
            }
            yield from (f"{job['name']}: {key} is not {v}" for key, v in in_place.items() if batch.get(key) != v)
        yield from _policy_mistakes(batch)


def _policy_mistakes(batch: dict[str, Any]) -> Iterator[str]:
    pod = batch["template"]["spec"]
    if pod["restartPolicy"] not in ("Never", "OnFailure"):
        yield "restartPolicy of a Job"
    if "podFailurePolicy" in batch:
        if pod["restartPolicy"] != "Never":
            yield "podFailurePolicy needs restartPolicy Never"
        for rule in batch["podFailurePolicy"]["rules"]:
            if ("onExitCodes" in rule) == ("onPodConditions" in rule):
                yield "a rule has onExitCodes or onPodConditions"
            codes = rule.get("onExitCodes", {"values": [1], "operator": "In", "containerName": None})
            if codes["values"] != sorted(set(codes["values"])) or (codes["operator"] == "In" and 0 in codes["values"]):
                yield f"exit codes {codes['values']}"
            if codes["containerName"] not in (None, *(container["name"] for container in pod["containers"])):
                yield f"no container {codes['containerName']}"
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        yield from (f"no volume {m['name']}" for m in container["volumeMounts"] if m["name"] not in volumes)
