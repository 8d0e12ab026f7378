"""Hosts that disagree: what differs is named by key and host before the first step, and nothing is trained."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megascale
from megascale.core.errors import Exit
from megascale.core.rank import Rank
from megascale.record.log_files import log_path
from tests.data.datasets import ORIGIN, write_documents
from tests.jobs import heed_signals
from tests.marks import only_quick
from tests.operate.node.test_torchrun import Torchrun, environment, free_port
from tests.runs import GPT, settings, write_config

HOST = socket.gethostname()


@dataclass(frozen=True)
class Disagreement:
    """What the second host is given, and the line of the message. `edit`: a source file that differs there, with old
    and new text. `line` has {folder} for the test's folder.
    """

    name: str
    line: str
    overrides: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    edit: tuple[str, str, str] | None = None


def override(key: str, given: str, first: str, second: str) -> Disagreement:
    line = f"  configuration {key}: {first} on {HOST} (rank 0), {second} on {HOST} (rank 1)"
    return Disagreement(key, line, (f"{key}={given}",))


DISAGREEMENTS = [
    override("train.steps", "12", "10", "12"),
    override("checkpoint.every", "3", "0", "3"),
    override("batch.global", "16", "8", "16"),
    override("optimizer.lr", "0.02", "0.01", "0.02"),
    override("name", "other", '"test"', '"other"'),
    override("model.hidden_size", "64", "32", "64"),
    override("parallel.tp", "2", "1", "2"),
    override("train.seed", "7", "1234", "7"),
    override("train.precision", "bf16", '"fp32"', '"bf16"'),
    override("data.train", "{folder}/b", '"{folder}/a"', '"{folder}/b"'),
    Disagreement(
        "environment",
        f"  environment NCCL_ALGO: unset on {HOST} (rank 0), Ring on {HOST} (rank 1)",
        env={"NCCL_ALGO": "Ring"},
    ),
    Disagreement(
        "version",
        f"  version megascale: {megascale.__version__} on {HOST} (rank 0), 0.0.1 on {HOST} (rank 1)",
        edit=("__init__.py", f'"{megascale.__version__}"', '"0.0.1"'),
    ),
    Disagreement("source", "  code megascale/optim/lr.py: ", edit=("optim/lr.py", '"""', '"""Changed. ')),
]
NAMES = {disagreement.name: disagreement for disagreement in DISAGREEMENTS}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration for two ranks, with two datasets of equal size to choose from."""
    for number, name in enumerate("ab"):
        documents = [np.random.default_rng(number).integers(0, 101, 400) for _ in range(4)]
        write_documents(tmp_path / name, documents, ORIGIN, 101)
    data = {"data__mock": False, "data__train": str(tmp_path / "a"), "data__split": [1.0, 0.0]}
    tree = settings(GPT, tmp_path / "runs", train__precision="fp32", **data)
    return write_config(tree, tmp_path / "config.toml")


def in_folder(text: str, folder: Path) -> str:
    return text.replace("{folder}", str(folder))


def changed_copy(folder: Path, edit: tuple[str, str, str]) -> Path:
    """Copy the package into `folder` and change a file. Returns the folder to put on PYTHONPATH."""
    path, old, new = edit
    ignored = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(Path(megascale.__file__).parent, folder / "megascale", ignore=ignored)
    source = copy / path
    source.write_text(source.read_text().replace(old, new, 1))
    return folder


def record(config: Path, rank: int, disagreement: Disagreement | None, world: int = 2) -> dict[str, str]:
    """The record of a rank that is given a disagreement; edits of sources are not made."""
    from megascale.config.loading import load_config
    from megascale.device import detect_device
    from megascale.train.rank_record import code_digests, rank_record

    overrides = [in_folder(text, config.parent) for text in disagreement.overrides] if disagreement else []
    env = disagreement.env if disagreement else {}
    resolved = load_config(str(config), overrides, world)
    values = rank_record(resolved, Rank(rank, world, 0, HOST), detect_device(0, allow_gpu=False), env)
    if disagreement and disagreement.edit:
        folder = changed_copy(config.parent / "copy", disagreement.edit)
        values |= {f"code {path}": digest for path, digest in code_digests(folder / "megascale").items()}
        if disagreement.name == "version":
            values["version megascale"] = "0.0.1"
    return values


def agree(records: Sequence[dict[str, str]], hosts: Sequence[str] = (), world: int = 0) -> list[str]:
    """Compare records on one thread a rank. Returns the errors' messages, "" without. `world`: what rank 0 takes for
    the world size, if another.
    """
    import torch.distributed as dist

    from megascale.comm.agreement import check_agreement
    from megascale.core.errors import HostsDisagreeError

    store, texts = dist.HashStore(), [""] * len(records)

    def compare(number: int) -> None:
        size = world if world and number == 0 else len(records)
        place = Rank(number, size, 0, hosts[number] if hosts else HOST)
        try:
            check_agreement(store, place, records[number])
        except HostsDisagreeError as error:
            assert error.exit_status == Exit.CONFIG
            texts[number] = str(error)

    threads = [threading.Thread(target=compare, args=(number,)) for number in range(len(records))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return texts


@pytest.mark.parametrize("name", NAMES)
def test_a_disagreement_is_named_on_every_rank(name: str, config: Path) -> None:
    first, second = record(config, 0, None), record(config, 1, NAMES[name])
    texts = agree([first, second])
    assert texts[0] == texts[1]
    assert in_folder(NAMES[name].line, config.parent) in texts[0]
    assert "nothing was trained" in texts[0]


def test_equal_records_agree(config: Path) -> None:
    records = [record(config, rank, None) for rank in (0, 1)]
    assert agree(records) == ["", ""]
    assert agree([{}] * 8) == [""] * 8


def test_hosts_and_ranks_are_grouped_by_value() -> None:
    values = ["1", "1", "2", "2", "3", "2"]
    texts = agree([{"key": value} for value in values], hosts=["a", "a", "b", "b", "c", "d"])
    assert "  key: 1 on a (rank 0), 2 on b (ranks 2, 3) and 1 more host, 3 on c (rank 4)  -> " in texts[0]


def test_a_world_size_in_dispute_is_named(config: Path) -> None:
    """Rank 0 takes the job for one of four ranks, and the other two never come."""
    first, second = record(config, 0, None, world=4), record(config, 1, None)
    texts = agree([first, second], world=4)
    line = f"job world size: 4 on {HOST} (rank 0), 2 on {HOST} (rank 1)"
    assert line in texts[0] and line in texts[1]


def test_a_dataset_replaced_on_one_host_is_named(config: Path) -> None:
    first = record(config, 0, None)
    for ending in (".bin", ".idx", ".json"):
        (config.parent / f"b{ending}").replace(config.parent / f"a{ending}")
    texts = agree([first, record(config, 1, None)])
    assert f"  data {config.parent}/a: " in texts[0]


def test_an_order_of_documents_replaced_on_one_host_is_named(config: Path) -> None:
    order = config.parent / "order.npy"
    ordered = Disagreement("data.document_order_file", "", (f"data.document_order_file={order}",))
    records = []
    for rank, numbers in enumerate(([0, 1, 2, 3], [3, 1, 2, 0])):
        np.save(order, np.array(numbers))
        records.append(record(config, rank, ordered))
    assert f"  data {order}: " in agree(records)[0]


def test_what_differs_between_hosts_rightly_is_not_compared(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rightly = {
        "NCCL_SOCKET_IFNAME": "eth1", "NCCL_IB_HCA": "mlx5_1", "OMP_NUM_THREADS": "7", "NCCL_DEBUG": "INFO",
        "TORCH_FR_DUMP_TEMP_FILE": "/tmp/host-b_", "TORCHINDUCTOR_CACHE_DIR": "/tmp/b", "CUDA_VISIBLE_DEVICES": "3",
        "MASTER_ADDR": "b", "HOSTNAME": "b", "NCCL_TOPO_FILE": "/b.xml",
    }  # fmt: skip
    other = record(config, 1, Disagreement("", "", env=rightly))
    assert agree([record(config, 0, None), other]) == ["", ""]


class OperatorRank:
    """A rank on a host of its own, as an operator starts them: all it knows is in the environment."""

    def __init__(self, config: Path, rank: int, port: int, overrides: Sequence[str], env: dict[str, str]) -> None:
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megascale", "train", str(config), *overrides],
            env=environment() | place | {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"} | env,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals,
        )  # fmt: skip

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def second_host(config: Path, disagreement: Disagreement) -> tuple[list[str], dict[str, str]]:
    """The overrides and the environment of the host that disagrees."""
    env = dict(disagreement.env)
    if disagreement.edit:
        folder = changed_copy(config.parent / "copy", disagreement.edit)
        env |= {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    return [in_folder(text, config.parent) for text in disagreement.overrides], env


def check_ends(ends: Sequence[tuple[int, str, str]], config: Path, disagreement: Disagreement) -> None:
    for _, out, err in ends:
        assert in_folder(disagreement.line, config.parent) in err, err
        assert "Traceback" not in err.partition("exitcode")[0], "torchrun adds its own"
        assert "step 1/" not in out
    assert not list((config.parent / "runs").rglob("metrics.jsonl")), "a run was begun"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_hosts_that_disagree_end_before_the_first_step(name: str, config: Path) -> None:
    port, disagreement = free_port(), NAMES[name]
    hosts = [OperatorRank(config, 0, port, [], {}), OperatorRank(config, 1, port, *second_host(config, disagreement))]
    ends = [host.end() for host in hosts]
    assert [status for status, _, _ in ends] == [Exit.CONFIG, Exit.CONFIG], ends
    check_ends(ends, config, disagreement)


def test_ranks_that_cannot_start_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that all hosts make ends the job at once."""
    import torch.distributed as dist

    from megascale.comm import agreement

    monkeypatch.setattr(agreement, "FAILED_START_S", 600.0)
    store = dist.HashStore()
    threads = [
        threading.Thread(target=agreement.announce_failed_start, args=(store, Rank(number, 4, 0, HOST), "a mistake"))
        for number in range(4)
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("failed", only_quick([0, 1], 1))
def test_a_rank_that_cannot_start_is_named_on_every_host(failed: int, config: Path) -> None:
    port = free_port()
    mistakes = [["data.train=nowhere"] if rank == failed else [] for rank in range(2)]
    hosts = [OperatorRank(config, rank, port, [f"name=start{port}", *mistakes[rank]], {}) for rank in range(2)]
    ends = [host.end() for host in hosts]
    assert [status for status, _, _ in ends] == [Exit.CONFIG, Exit.CONFIG], ends
    _, _, err = ends[1 - failed]
    assert f"{HOST} (rank {failed}) cannot start: command line  data.train: there is no file nowhere.bin" in err, err
    assert not list((config.parent / "runs").rglob("metrics.jsonl")), "a run was begun"
    records = log_path(f"start{port}", 0, 0)
    assert not list(records.parent.glob(records.name.replace("-0-00000", "-*"))), "a flight record was left"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.steps", "model.hidden_size", "source"])
def test_two_launchers_that_disagree(name: str, config: Path) -> None:
    disagreement = NAMES[name]
    shared = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    overrides, env = second_host(config, disagreement)
    hosts = [
        Torchrun(config, env=shared | {"NODE_RANK": "0"}),
        Torchrun(config, *overrides, env=shared | env | {"NODE_RANK": "1"}),
    ]
    ends: list[Any] = [host.end() for host in hosts]
    assert all(status for status, _, _ in ends), "torchrun's own status is 1"
    check_ends(ends, config, disagreement)


@pytest.mark.slow
def test_unplugged_another_learning_rate_trains_on(config: Path) -> None:
    """Without the comparison the job ends well, though its replicas were updated with different rates."""
    site = config.parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys, types\nm = types.ModuleType('megascale.comm.agreement')\n"
        "m.FAILED_START_S, m.Record, m.check_agreement = 5.0, dict, lambda *a: None\nsys.modules[m.__name__] = m\n"
    )
    port, env = free_port(), {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}
    hosts = [OperatorRank(config, rank, port, ["optimizer.lr=0.02"] * rank, env) for rank in (0, 1)]
    assert [host.end()[0] for host in hosts] == [Exit.OK, Exit.OK]
