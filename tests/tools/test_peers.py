"""Comparison with the peers: arithmetic, tables, and the same task for all systems."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megascale.layout.parameters import all_params
from megascale.layout.tensors import ParamSpec
from megascale.layout.topology import Coord, Topology
from tests.jobs import lives
from tests.runs import LLAMA, config_of, settings
from tests.tools.lab.test_testbed import missing

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools" / "bench"
sys.path.insert(0, str(BENCH))  # the tool's files stand beside each other

import peer_table  # noqa: E402
import peer_weights  # noqa: E402
import peers  # noqa: E402
from peer_run import Failure, Measurement, agree, error_line, execute, read  # noqa: E402
from peer_systems import SYSTEMS, Layout, Size, Task, command, with_experts  # noqa: E402

PEERS = Path(os.environ.get("MEGASCALE_PEERS", ROOT.parent / "shared" / "peers"))
NEEDS_PEERS = pytest.mark.skipif(
    not (PEERS / "torch_native_cpu.py").is_file(), reason=f"the peers' scripts are not in {PEERS}"
)
TINY = Size(hidden=32, layers=2, heads=2, ffn=48, seq=16, vocab=128, micro_batch=1, global_batch=2).arguments()


def run_of(tokens_per_s: float, cpu_s: float, rss_mib: float) -> Measurement:
    return Measurement(tokens_per_s, cpu_s, rss_mib, (6.25, 6.125), 0.01, "2.13.0")


RESULTS = {
    "megascale": [run_of(1500, 2.0, 500), run_of(900, 3.0, 510), run_of(1600, 2.5, 505)],
    "torch-native": [run_of(1000, 4.0, 600), run_of(2000, 5.0, 601), run_of(1200, 9.0, 599)],
    "megatron-core": [run_of(750, 5.0, 1010)] * 3,
    "torchtitan": [Failure("ImportError: no | here")],
}


def test_ratios_are_of_medians() -> None:
    ours, native, megatron, titan = peer_table.rows(RESULTS)
    assert ours == peer_table.Row("megascale", 1500, 900, 1600, 2.5, 505)
    assert isinstance(native, peer_table.Row)
    assert (native.tokens_per_s, native.slowest, native.fastest) == (1200, 1000, 2000)
    assert native.ratios == (1500 / 1200, 2.5 / 5.0, 505 / 600)
    assert isinstance(megatron, peer_table.Row)
    assert megatron.ratios == (2.0, 0.5, 0.5)
    assert titan == peer_table.Failed("torchtitan", "ImportError: no | here")
    assert peer_table.fastest_peer([ours, native, megatron, titan]) is native


def test_without_ours_there_are_no_ratios() -> None:
    for ours in ({}, {"megascale": [Failure("died")]}):
        *_, row = peer_table.rows({**ours, "torch-native": RESULTS["torch-native"]})
        assert isinstance(row, peer_table.Row)
        assert row.ratios is None
        assert peer_table.verdict([row]) == "the fastest peer is torch-native"


def test_tables() -> None:
    found = peer_table.rows(RESULTS)
    shown = peer_table.text("tp2", found).splitlines()
    assert shown[0] == "layout tp2: the fastest peer is torch-native; megascale has 1.250 x the tokens/s"
    assert shown[3].split() == ["torch-native", "1,200", "1,000..2,000", "5.000", "600", "1.250", "0.500", "0.842"]
    assert shown[-1].split(maxsplit=1) == ["torchtitan", "failed: ImportError: no | here"]
    page = peer_table.markdown({"1": found}, "As measured.").splitlines()
    assert page[0] == "As measured."
    assert page[5] == "| 1 | **torch-native** | 1,200 | 1,000..2,000 | 5.000 | 600 | 1.250 | 0.500 | 0.842 |"
    assert r"no \| here" in page[-1]
    assert {line.replace(r"\|", "").count("|") for line in page[2:]} == {10}


def test_what_the_scripts_print() -> None:
    native = 'step   1  loss 9.06919  grad_norm 0.89  2.3 ms\nstep   2  loss 9.06679  x\n{"tokens_per_s": 10.0, '
    ours = "step 1/2  loss 9.0692  norm 0.62\n" + native
    expected = str(Measurement(10.0, 2.5, 700.0, (9.06919, 9.06679), 0.2, "2"))  # nan differs from itself
    assert str(read(ours + '"cpu_ms_per_step": 2500, "rss_mb_max": 700, "torch": "2"}\n', 0.2)) == expected
    assert str(read(native + '"cpu_ms_step_all_ranks": 2500, "max_rss_mb": 700, "torch": "2"}\n', 0.2)) == expected
    assert read("step 1 loss 3.0\n", 0.0) == Failure("printed no losses or no JSON object")


def test_another_loss_is_another_task() -> None:
    result = run_of(1, 1, 1)
    assert agree(result, (6.25004, 6.125)) == dataclasses.replace(result, difference=6.25004 - 6.25)
    for expected in ((6.2502, 6.125), (6.25, 6.1), (float("nan"), 6.125)):
        assert isinstance(agree(result, expected), Failure)
    assert isinstance(agree(dataclasses.replace(result, losses=(6.25, float("nan"))), (6.25, 6.125)), Failure)


def test_the_error_of_a_run_is_its_first() -> None:
    err = "[rank1]: Traceback (most recent call last):\n[rank1]: torch.X.OutOfError: why\nRuntimeError: b\n"
    assert error_line(err) == "torch.X.OutOfError: why"
    assert error_line("some\nKilled\n\n") == "Killed"
    assert execute([sys.executable, "-c", "print({}); raise OSError('gone')"], 60, "/tmp") == Failure("OSError: gone")


def test_a_run_that_is_killed_says_so() -> None:
    command = "import os, sys; print('28 steps', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    killed = execute([sys.executable, "-c", command], 60, "/tmp")
    assert killed == Failure("killed by signal 9, perhaps out of memory")


def test_nothing_is_left_of_a_run_that_takes_too_long(tmp_path: Path) -> None:
    worker = ["sleep", "60"]
    launcher = (
        "import subprocess, time, pathlib; "
        f"worker = subprocess.Popen({worker}, start_new_session=True); "
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(worker.pid)); time.sleep(60)"
    )
    assert execute([sys.executable, "-c", launcher], 2, str(tmp_path)) == Failure("not finished after 2 s")
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while lives(pid) and time.monotonic() < deadline:  # the kernel takes a moment
        time.sleep(0.01)
    assert not lives(pid)


def test_layouts() -> None:
    assert Layout.parse("1") == Layout("1")
    found = Layout.parse("tp2 sp pp2 vpp4 dp3")
    assert (found.tp, found.sp, found.pp, found.vpp, found.dp, found.world) == (2, True, 2, 4, 3, 12)
    assert found.arguments() == ["--tp", "2", "--pp", "2", "--vp", "4", "--dp", "3", "--sp"]
    assert Layout.parse("dp2 ep2").arguments()[-2:] == ["--ep", "2"]
    assert Layout.parse("dp2 zero3") == Layout("dp2 zero3", dp=2, zero3=True)
    for name in ("", "tp0", "xp2", "tp2,pp2"):
        with pytest.raises(ValueError, match="is not a layout"):
            Layout.parse(name)


def test_only_systems_that_shard_are_compared_with_sharded_weights() -> None:
    layout, task = Layout.parse("dp2 zero3"), Task(Size(), 8, 2)
    systems = [system for system in SYSTEMS.values() if system.trains_in(layout)]
    assert [system.name for system in systems] == [
        "megascale",
        "torch-native-fsdp2",
        "megatron-core-zero1",
        "torchtitan",
    ]
    given = ["--zero3" in command(system, layout, task, Path("python"), Path("peers")) for system in systems]
    assert given == [True, False, False, False]


def test_every_system_is_given_the_same_sizes() -> None:
    task = Task(Size(), 8, 2)
    for system in SYSTEMS.values():
        words = command(system, Layout.parse("tp2 dp2"), task, Path("python"), Path("peers"))
        given = dict(pairwise(words))
        assert (given["--hidden"], given["--ffn"], given["--global-batch"]) == ("256", "768", "16")
        assert (given["--tp"], given["--steps"], given["--warmup"]) == ("2", "8", "2")
        assert "--topk" not in words
    for system in with_experts().values():
        words = command(system, Layout("1"), Task(Size(experts=8), 8, 2), Path("python"), Path("peers"))
        given = dict(pairwise(words))
        assert (given["--experts"], given["--topk"], system.weights) == ("8", "2", "megatron-core")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--peers nowhere --systems torch-native", "torch_native_cpu.py is missing"),
        ("--systems megascal", "unknown megascal; choose from megascale, "),
        ("--experts 8 --systems torchtitan", "unknown torchtitan; choose from megascale, megatron-core, "),
        ("--layouts tp2,zz", "'zz' is not a layout"),
        ("--steps 2 --warmup 2", "leaves no step to time"),
        ("--rounds 0", "--rounds: give at least one"),
        ("--cores 0.5", "give --rate too"),
        ("--python torchtitan=nowhere", "SYSTEM=PATH"),
        ("--systems megascale --markdown nowhere.md", "no lines <!-- peers: begin -->"),
    ],
)
def test_mistakes_cost_no_measurement(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "execute", None)
    assert peers.main(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("family", peer_weights.FAMILIES)
def test_ranks_hold_parts_of_the_same_weights(family: str, tmp_path: Path) -> None:
    model = LLAMA | {"num_kv_heads": 4}
    config = config_of(settings(model, tmp_path), tmp_path)
    draw = peer_weights.FAMILIES[family](config.model, 7)

    def part(parameter: ParamSpec, rank: int, tp: int) -> torch.Tensor:
        target = torch.full(parameter.local_shape(Topology(tp=tp)), 3.0)
        peer_weights.fill(target, parameter, Topology(tp=tp), Coord(tp=rank), draw)
        return target

    for parameter in all_params(config.model):
        full = part(parameter, 0, 1)
        halves = [part(parameter, rank, 2) for rank in range(2)]
        count = len(parameter.parts)
        if parameter.sharding.get("tp") == 0:  # q of rank 0, q of rank 1, k of rank 0, ...
            pieces = [half.chunk(count) for half in halves]
            halves = [piece for pair in zip(*pieces, strict=True) for piece in pair]
            rows = sum(tensor.shape[0] for tensor in parameter.parts)
            assert torch.equal(torch.cat(halves)[:rows], full[:rows]), parameter.name
        elif parameter.sharding.get("tp") == 1:
            assert torch.equal(torch.cat(halves, 1), full), parameter.name
        else:
            assert all(torch.equal(half, full) for half in halves), parameter.name


def test_ranks_hold_experts_of_the_same_weights(tmp_path: Path) -> None:
    model = config_of(settings(LLAMA | {"experts": 4}, tmp_path), tmp_path).model
    draw = peer_weights.FAMILIES["megatron-core"](model, 7)
    for parameter in all_params(model):
        if ".experts." in parameter.name:
            whole, *halves = (torch.empty(parameter.local_shape(Topology(dp=ep, ep=ep))) for ep in (1, 2, 2))
            peer_weights.fill(whole, parameter, Topology(), Coord(), draw)
            for rank, half in enumerate(halves):
                peer_weights.fill(half, parameter, Topology(dp=2, ep=2), Coord(dp=rank), draw)
            assert torch.equal(torch.cat(halves), whole)
            assert not torch.equal(*halves)


@NEEDS_PEERS
@pytest.mark.slow
def test_experts_train_on_the_same_task(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--systems", "megascale,megatron-core", "--experts", "8", "--layouts", "dp2 ep2", "--rounds", "1"]
    assert peers.main(["--peers", str(PEERS), "--json", *words, "--steps", "2", "--warmup", "1", *TINY]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["system"] for row in shown["layouts"]["dp2 ep2"]] == ["megascale", "megatron-core"]
    assert shown["loss_difference"] < 1e-5


@NEEDS_PEERS
@pytest.mark.slow
def test_megascale_and_a_peer_train_on_the_same_task_and_another_task_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    native = SYSTEMS["torch-native"]
    other = dataclasses.replace(native, name="other", extra=(*native.extra, "--data-batches", "1"))
    monkeypatch.setitem(SYSTEMS, "other", other)
    page = tmp_path / "performance.md"
    page.write_text("<!-- peers: begin -->\n<!-- peers: end -->\n")
    words = ["--systems", "megascale,torch-native,other", "--layouts", "1", "--rounds", "1", "--steps", "2", "--warmup"]
    options = ["--peers", str(PEERS), "--json", "--markdown", str(page)]
    assert peers.main([*options, *words, "1", *TINY]) == 1  # the third system's fault
    shown = json.loads(capsys.readouterr().out)
    ours, theirs, wrong = shown["layouts"]["1"]
    assert (ours["system"], theirs["system"], wrong["system"]) == ("megascale", "torch-native", "other")
    assert theirs["ratios"] == [ours[key] / theirs[key] for key in ("tokens_per_s", "cpu_s", "rss_mib")]
    assert wrong["why"].startswith("not the same task: the loss of step 2 is")
    assert shown["loss_difference"] < 1e-5  # what is left of digits that were not printed
    assert page.read_text().count("\n| 1 |") == 3


@NEEDS_PEERS
@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("cores", ["", "--cores 0.5"])
def test_every_rank_on_a_host_of_its_own(cores: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--systems", "megascale,torch-native", "--layouts", "pp2", "--rounds", "1", "--steps", "2", "--warmup"]
    hosts = ["--rate", "50mbit", *cores.split()]
    assert peers.main(["--peers", str(PEERS), "--json", *hosts, *words, "1", *TINY]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["system"] for row in shown["layouts"]["pp2"]] == ["megascale", "torch-native"]
    assert all(row["tokens_per_s"] > 0 for row in shown["layouts"]["pp2"])
    where = ", one rank per host with 0.5 cores, " if cores else ", one rank per host, "
    assert f"{where}links of 50mbit" in shown["caption"]
