"""Switches above nodes, read from Slurm's and Kubernetes' own formats; a mistake is told with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale.core.errors import ConfigError
from megascale.operate.driver.switches import host_list, read_switches

TREE = """# two racks below a spine
SwitchName=rack0 Nodes=a[0-2],b LinkSpeed=100
SwitchName=rack1 Nodes=a[08-10]   # with leading zeros
SwitchName=spine Switches=rack[0-1]
"""

SHOWN = """SwitchName=rack0 Level=0 LinkSpeed=1 Nodes=a[0-1]
SwitchName=rack1 Level=0 LinkSpeed=1 Nodes=a2
SwitchName=spine Level=1 LinkSpeed=1 Nodes=a[0-2] Switches=rack[0-1]
"""


def read(folder: Path, text: str) -> dict[str, tuple[str, ...]]:
    (folder / "topology").write_text(text)
    return dict(read_switches(folder / "topology"))


def test_a_tree_of_slurm(tmp_path: Path) -> None:
    rack0, rack1 = ("spine", "rack0"), ("spine", "rack1")
    expected = {"a0": rack0, "a1": rack0, "a2": rack0, "b": rack0, "a08": rack1, "a09": rack1, "a10": rack1}
    assert read(tmp_path, TREE) == expected


def test_what_scontrol_shows(tmp_path: Path) -> None:
    assert read(tmp_path, SHOWN) == {"a0": ("spine", "rack0"), "a1": ("spine", "rack0"), "a2": ("spine", "rack1")}


def test_blocks_of_slurm(tmp_path: Path) -> None:
    text = "BlockName=one Nodes=a[0-1]\nBlockName=two Nodes=a2\nBlockSizes=2,4\n"
    assert read(tmp_path, text) == {"a0": ("one",), "a1": ("one",), "a2": ("two",)}


def test_labels_of_kubernetes(tmp_path: Path) -> None:
    labels = {
        "n0": {"topology.kubernetes.io/rack": "r0", "topology.kubernetes.io/zone": "z", "kubernetes.io/os": "linux"},
        "n1": {"network.topology.nvidia.com/leaf": "l1", "network.topology.nvidia.com/spine": "s1"},
    }
    items = [{"metadata": {"name": name, "labels": of_node}} for name, of_node in labels.items()]
    assert read(tmp_path, json.dumps({"items": items})) == {"n0": ("z", "r0"), "n1": ("s1", "l1")}


def test_host_lists() -> None:
    assert host_list("a[0-1]-r[7,9],b") == ["a0-r7", "a0-r9", "a1-r7", "a1-r9", "b"]
    assert host_list("") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SwitchName=a Nodes=n0\nNodes=n1\n", "topology:2  the line names no switch"),
        ("SwitchName=a Nodes=n0\nSwitchName=b Nodes=n[0-1]\n", "topology:2  n0 is below b, and below a"),
        ("SwitchName=a Nodes=n0\nSwitchName=b Switches=a\nSwitchName=c Switches=b,c\n", "are above each other"),
        ("SwitchName=a Nodes=n[x]\n", "is no topology file"),
        ('{"nodes": []}', "is no topology file"),
        ('{"items": [{"metadata": {"name": "n0", "labels": {}}}]}', "names no switch above any node"),
        ("", "names no switch above any node"),
    ],
)
def test_mistakes_of_a_file(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert said in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_switches(tmp_path / "absent")
