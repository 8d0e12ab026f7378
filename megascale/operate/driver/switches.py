"""The switches above each node (`read_switches`): from Slurm's topology.conf or `scontrol show topology`, or from the
labels in `kubectl get nodes -o json`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megascale.core.errors import ConfigError, Problem

Switches = Mapping[str, tuple[str, ...]]
"""The switches above each node, by the node's name, the outermost first."""

NODE_LABELS = (
    "topology.kubernetes.io/region", "topology.kubernetes.io/zone",
    "cloud.google.com/gce-topology-block", "cloud.google.com/gce-topology-subblock",
    *(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (1, 2, 3)),
    *(f"fabric.topograph.run/tier-{tier}" for tier in (3, 2, 1, 0)), "accelerator.topograph.run/domain",
    *(f"network.topology.nvidia.com/{tier}" for tier in ("core", "spine", "leaf", "accelerator")),
    "topology.kubernetes.io/rack",
)  # fmt: skip
"""Labels of a Kubernetes node that name what it shares with others, from the widest to the narrowest."""

HINT = "Slurm's topology.conf, or the output of `scontrol show topology` or of `kubectl get nodes -o json`"


def read_switches(path: Path) -> Switches:
    """Read a topology file. Raises: ConfigError with the line of a mistake"""
    try:
        text = path.read_text(encoding="utf-8")
        found = _from_labels(json.loads(text)) if text.lstrip().startswith("{") else _from_slurm(path, text)
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _error(path, "is no topology file") from None
    if not any(found.values()):
        raise _error(path, "names no switch above any node")
    return found


def _error(where: object, what: str, hint: str = HINT) -> ConfigError:
    return ConfigError([Problem(str(where), "", what, hint)])


def _from_labels(listed: Mapping[str, list[Mapping[str, Mapping[str, dict[str, str]]]]]) -> dict[str, tuple[str, ...]]:
    nodes = [item["metadata"] for item in listed["items"]]
    return {str(node["name"]): tuple(node["labels"][key] for key in NODE_LABELS if key in node["labels"])
            for node in nodes}  # fmt: skip


def _from_slurm(path: Path, text: str) -> dict[str, tuple[str, ...]]:
    leaf_of, above = dict[str, str](), dict[str, str]()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        values = {key.lower(): value for key, _, value in (word.partition("=") for word in words)}
        name = values.get("switchname") or values.get("blockname")
        if name is None:
            if words and "blocksizes" not in values:
                raise _error(f"{path}:{number}", "the line names no switch", "SwitchName=NAME Nodes=node[0-7]")
            continue
        below, listed = (above, values["switches"]) if "switches" in values else (leaf_of, values.get("nodes", ""))
        for child in host_list(listed):
            if below.setdefault(child, name) != name:
                what = f"{child} is below {name}, and below {below[child]} in a line before"
                raise _error(f"{path}:{number}", what, "a tree of switches: each node and switch in one line")
    return {node: tuple(reversed([*_climb(path, leaf, above)])) for node, leaf in leaf_of.items()}


def _climb(path: Path, switch: str | None, above: Mapping[str, str]) -> Iterator[str]:
    """Yield a switch and those above it."""
    seen = list[str]()
    while switch is not None:
        if switch in seen:
            raise _error(path, f"the switches {', '.join(seen)} are above each other", "a tree of switches")
        seen.append(switch)
        yield switch
        switch = above.get(switch)


def host_list(text: str) -> list[str]:
    """Expand a host list of Slurm, such as `a[0-2,07],b`. Raises: ValueError for a bracket without numbers"""
    names = list[str]()
    for word in filter(None, re.split(r",(?![^\[]*\])", text)):
        parts = enumerate(re.split(r"\[([^\]]*)\]", word))  # names and ranges in turn
        names += map("".join, itertools.product(*(_numbers(part) if at % 2 else [part] for at, part in parts)))
    return names


def _numbers(ranges: str) -> Iterator[str]:
    """Yield the numbers of ranges with their leading zeros, such as `8` to `10` of `8-10`."""
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1))
