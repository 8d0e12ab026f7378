"""Comparison on one GPU, tested on a CPU: cases, tables, stored results, and tiny runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.core.errors import ConfigError
from megascale.layout.chunks import fp8_layers
from megascale.layout.parameters import parameter_count
from megascale.plan.account.flops import token_flops

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "bench"))  # the tool's files stand beside each other

import gpu  # noqa: E402
import gpu_table  # noqa: E402
import peer_install  # noqa: E402
from gpu_systems import CASES, FIT, SYSTEMS, Job, Record, agree, command, measure, python_of, short  # noqa: E402
from gpu_table import Failed, Row  # noqa: E402

PEERS = Path(os.environ.get("MEGASCALE_PEERS", ROOT.parent / "shared" / "peers"))
NEEDS_PEERS = pytest.mark.skipif(
    not (PEERS / "megatron_cpu.py").is_file(), reason=f"the peers' scripts are not in {PEERS}"
)
H100 = "NVIDIA H100 80GB HBM3"
FLOPS = token_flops(Job("llama3-8b-slice", "bf16", 20, 5).config().model)


def run_of(system: str, tokens_per_s: float, precision: str = "bf16", **more: Any) -> Record:
    """Return the record of a run of the 8B slice on an H100."""
    median = 4 * 8192 / tokens_per_s
    ours = {"attainable": {"flops": 700e12, "source": "measured"}, "kernels": {"gemm": 0.8, "loss": 0.0, "idle": 0.2}}
    result = {
        "id": f"{system}{precision}{tokens_per_s}", "case": "llama3-8b-slice", "precision": precision, "system": system,
        "small": False, "layers": 8, "device": H100, "torch": "2.13.0+cu130", "losses": [12.1, 12.0],
        "step_s": {"median": median, "low": 0.9 * median, "high": 1.1 * median, "count": 20},
        "tokens_per_s": tokens_per_s, "flops_per_token": {"full": FLOPS.full, "causal": FLOPS.causal},
        "peak_memory_bytes": 60 << 30, "how": f"{system} 1.0: as it is",
    }  # fmt: skip
    return result | (ours if system == "megascale" else {}) | more


def failed(system: str, why: str) -> Record:
    return {
        "id": system, "case": "llama3-8b-slice", "precision": "bf16", "system": system, "small": False, "layers": 8,
        "failure": why,
    }  # fmt: skip


RUNS = [
    run_of("megascale", 30_000), run_of("torchtitan", 20_000), failed("megatron-core", "out of | memory"),
    run_of("megascale", 36_000), run_of("torchtitan", 24_000),
    run_of("megascale", 40_000, "fp8"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("small", [False, True])
def test_every_case_is_a_run_of_one_process(case: str, small: bool) -> None:
    job = Job(case, "bf16", 20, 5, small=small)
    config = job.config()
    assert (config.world_size, config.data.mock, config.train.precision) == (1, True, "bf16")
    assert Job(case, "bf16", 20, 5, layers=3).config().model.num_layers == 3
    assert config.batch.micro * config.model.seq_length == (64 if small else 8192)
    task = job.task()
    assert task["model"]["vocab_size"] % 128 == 0
    assert 0 <= job.parameters() - parameter_count(config.model) < 128 * config.model.hidden_size
    assert (task["micro"], task["total"], task["cpu"]) == (config.batch.micro, config.batch.total, small)
    json.dumps(task)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("small", [False, True])
def test_in_fp8_every_layer_of_a_case_is_quantized_like_the_peers(case: str, small: bool) -> None:
    for layers in (None, 1, 2):
        config = Job(case, "fp8", 20, 5, layers=layers, small=small).config()
        assert fp8_layers(config.model, config.train, config.fp8) == range(config.model.num_layers)


def test_a_precision_that_this_version_lacks_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"train\.precision"):
        Job("llama3-1b", "fp4", 20, 5).config()


def test_every_system_has_a_command(tmp_path: Path) -> None:
    job = Job("llama3-8b-slice", "bf16", 20, 5)
    for system in SYSTEMS:
        words = command(system, job, Path("python"), tmp_path)
        assert words[0] == "python"
        assert system == "megascale" or Path(words[3]).is_file()
    assert json.loads((tmp_path / "task.json").read_text()) == json.loads(json.dumps(job.task()))
    ours = command("megascale", Job("llama3-8b-slice", "bf16", 20, 5, layers=FIT), Path("python"), tmp_path)
    assert ours[ours.index("--layers") + 1] == "fit"
    assert not any("num_layers" in word for word in ours)


def test_rows_are_medians_over_rounds() -> None:
    result = gpu_table.tables(RUNS)
    assert list(result) == [(H100, "llama3-8b-slice", 8, "bf16"), (H100, "llama3-8b-slice", 8, "fp8")]
    ours, titan, megatron = result[H100, "llama3-8b-slice", 8, "bf16"]
    assert isinstance(ours, Row) and isinstance(titan, Row)
    assert (ours.rounds, ours.tokens_per_s, ours.ratio) == (2, 33_000, None)
    assert (titan.tokens_per_s, titan.ratio) == (22_000, 1.5)
    assert titan.full == pytest.approx(FLOPS.full * 22_000 / 989.4e12)
    assert titan.causal == pytest.approx(FLOPS.causal * 22_000 / 989.4e12)
    assert titan.attained == pytest.approx(FLOPS.full * 22_000 / 700e12)  # against what megascale measured
    assert ours.low_s == pytest.approx(0.9 * 4 * 8192 / 36_000)
    assert ours.high_s == pytest.approx(1.1 * 4 * 8192 / 30_000)
    assert megatron == Failed("megatron-core", "out of | memory")


def test_the_tables() -> None:
    result = gpu_table.tables(RUNS)
    rates = [("bf16", {"median": 7e14}), ("fp8", None)]
    gemm = {"rates": [{"shape": "8x8x8", "format": name, "rate": rate} for name, rate in rates]}
    page = gpu_table.markdown(result, RUNS, gemm).splitlines()
    assert page[0].startswith(f"Measured on {H100}; torch 2.13.0+cu130. Medians of 20 timed steps")
    rows = [line for line in page if line.startswith("| llama3-8b-slice, 8 layers |") and line.count("|") > 6]
    assert [row.split(" | ")[2] for row in rows] == ["megascale", "torchtitan", "megatron-core", "megascale"]
    assert rows[1].endswith("| 60.0 | 1.500 |")
    assert r"n/a: out of \| memory" in rows[2]
    assert "| llama3-8b-slice, 8 layers | bf16 | 80.0% | 20.0% |" in page  # no column for what nothing takes
    assert "| 8x8x8 | 700.0 TFLOP/s | n/a |" in page
    assert "- torchtitan 1.0: as it is." in page
    shown = gpu_table.text(result)
    assert "  megatron-core: out of | memory" in shown
    assert max(map(len, shown.splitlines())) < 120


def test_goals_are_judged_as_measured() -> None:
    result = gpu_table.goals(gpu_table.tables(RUNS))
    full, causal = (value * 33_000 / 989.4e12 for value in (FLOPS.full, FLOPS.causal))
    assert causal < 0.6 < full + 0.1
    verdict = "reached" if causal >= 0.55 else "reached in full" if full >= 0.55 else "missed"
    assert result == [
        f"llama3-8b-slice bf16: MFU {full:.1%} full, {causal:.1%} causal; 55% {verdict}",
        "llama3-8b-slice bf16: 1.500 x torchtitan's tokens/s; 1 reached",
        "llama3-8b-slice fp8: 1.21 x bf16's tokens/s; 1.2 reached",
    ]
    slow = gpu_table.goals(gpu_table.tables([run_of("megascale", 10_000), run_of("torchtitan", 11_000)]))
    assert slow[0].endswith("55% missed")
    assert slow[1] == "llama3-8b-slice bf16: 0.909 x torchtitan's tokens/s; 1 missed"
    elsewhere = [run_of("megascale", 10_000, device="a CPU")]
    assert gpu_table.goals(gpu_table.tables(elsewhere)) == []


def test_another_loss_is_another_task() -> None:
    ours, same, other = run_of("megascale", 1), run_of("torchtitan", 1, losses=[12.3, 1]), run_of("torchtitan", 1)
    assert agree(same, [ours]) is same
    other["losses"] = [11.8, 11.7]
    wrong = agree(other, [ours])
    assert wrong["failure"] == "not the same task: the first loss is 11.8000, megascale's is 12.1000"
    assert "tokens_per_s" not in wrong
    assert agree(other, [ours | {"layers": 4}]) is other  # of another slice
    other["losses"] = [float("nan"), 1.0]
    assert "failure" in agree(other, [ours])


def test_an_error_in_a_line() -> None:
    assert short("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB") == "out of memory"
    assert short("x" * 300) == "x" * 157 + "..."


def results(folder: Path, name: str, runs: list[Record]) -> Path:
    path = folder / name
    path.write_text(json.dumps({"runs": runs, "gemm": None}))
    return path


def test_runs_of_several_calls_become_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = results(tmp_path, "one.json", RUNS[:3]), results(tmp_path, "two.json", RUNS[2:])
    page = tmp_path / "page.md"
    page.write_text("<!-- gpu: begin -->\n<!-- gpu: end -->")
    words = ["--table", "--results", str(one), "--merge", str(two), "--markdown", str(page)]
    assert gpu.main(words) == 0
    assert "33,000" in capsys.readouterr().out
    assert page.read_text().count("| llama3-8b-slice, 8 layers |") == 4 + 2, "rows, and shares of both precisions"
    kept = gpu.Results([one, two], tmp_path / "new.json")
    assert [run["id"] for run in kept.runs] == [run["id"] for run in RUNS]  # the third once
    kept.add(run_of("megascale", 1))
    assert len(json.loads((tmp_path / "new.json").read_text())["runs"]) == 7


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu_count", lambda: 1)


def test_without_a_gpu_nothing_is_run_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "gpu_count", lambda: 0)
    monkeypatch.setattr(gpu, "install", None)
    assert gpu.main(["--install", "--results", str(tmp_path / "r.json")]) == 2
    assert "torch finds no GPU, and the cases need one" in capsys.readouterr().err
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- gpu: begin -->\n<!-- gpu: end -->\nafter")
    before = page.read_text()
    failed = results(tmp_path, "kept.json", [run_of("megascale", 1) | {"failure": "killed"}])
    assert gpu.main(["--table", "--results", str(failed), "--markdown", str(page)]) == 2
    assert "holds no successful run" in capsys.readouterr().err and page.read_text() == before


def test_a_call_fails_by_its_own_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = run_of("megascale", 1) | {"failure": "killed"}
    path = results(tmp_path, "kept.json", [failed])
    words = ["--systems", "megascale", "--cases", "llama3-8b-slice", "--precisions", "bf16", "--no-gemm"]
    assert gpu.main(["--table", "--results", str(path)]) == 0
    for result, status in ((run_of("megascale", 2), 0), (failed, 1)):
        monkeypatch.setattr(gpu, "measure", lambda *_, result=result: result)
        assert gpu.main([*words, "--rounds", "1", "--results", str(path)]) == status


def test_tiny_cases_are_kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "measure", lambda *_: run_of("megascale", 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--systems", "megascale", "--cases", "llama3-8b-slice", "--precisions", "bf16", "--no-gemm"]
    assert gpu.main([*words, "--rounds", "1"]) == gpu.main([*words, "--rounds", "1", "--small"]) == 0
    assert sorted(path.name for path in (tmp_path / "build").iterdir()) == ["bench-gpu-small.json", "bench-gpu.json"]


@pytest.mark.parametrize(
    ("given", "words"),
    [([], "--install --markdown docs/results/gpu.md"), (["SMALL=1"], "--small --rounds 1")],
)
def test_make_runs_it_on_a_gpu_or_tries_it_on_a_cpu(given: list[str], words: str) -> None:
    command = ["make", "-n", "-C", str(gpu.ROOT), "bench-gpu", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f".venv/bin/python tools/bench/gpu.py {words}\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 3", "--steps 3: the median needs 20 or more"),
        ("--rounds 0", "at least one"),
        ("--layers llama3-1b", "--layers llama3-1b: '' is not an integer of 1 or more"),
        ("--layers llama3-9b=2", "--layers llama3-9b=2: give NAME=VALUE with a NAME of llama3-1b"),
        ("--python torchtitan=nowhere", "--python torchtitan=nowhere: there is no file 'nowhere'"),
        ("--precisions bf61", "--precisions: unknown bf61; choose from fp32"),
        ("--systems megatron-core --layers llama3-1b=fit", "needs megascale among --systems"),
        ("--table --merge nowhere.json", "nowhere.json: No such file or directory"),
        ("--table", "holds no runs to show: leave out --table to measure some"),
        ("--markdown nowhere.md", "no lines <!-- gpu: begin -->"),
    ],
)
def test_mistakes_cost_no_measurement(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "measure", None)
    monkeypatch.setattr(gpu, "gemm_rates", None)
    assert gpu.main([*words.split(), "--results", str(tmp_path / "r.json")]) == 2
    assert message in capsys.readouterr().err


def test_a_system_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pythons = {"megascale": Path("python")}
    assert gpu.choose([], pythons) == ["megascale"]
    assert "not installed: torchtitan, megatron-core; --install torchtitan megatron-core" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not installed: torchtitan"):
        gpu.choose(["megascale", "torchtitan"], pythons)


@pytest.mark.parametrize(("present", "titan"), [("2.11.0+cu130", "0.2.2"), ("2.13.0", "0.3.0"), ("2.15.0a0", "0.3.0")])
def test_the_torchtitan_that_fits_this_torch_is_installed(
    present: str, titan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_install, "present", {"torch": present}.get)
    assert f"torchtitan=={titan}" in peer_install.requirements("torchtitan")[1]


@pytest.mark.slow
def test_a_peer_that_cannot_be_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip runs for real, and is told of no index and no folder."""
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE", "PIP_DISABLE_PIP_VERSION_CHECK"):
        monkeypatch.setenv(name, {"PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.get(name, "1"))
    monkeypatch.setattr(peer_install, "BESIDE", tmp_path / "peers")
    monkeypatch.setattr(peer_install, "ENVIRONMENTS", tmp_path / "none")
    gpu.install(["torchtitan"], small=True)
    assert "torchtitan cannot be installed: ERROR: No matching distribution found" in capsys.readouterr().err
    assert peer_install.beside("torchtitan") is None
    sees = [str(tmp_path / "peers/torchtitan/bin/python"), "-c", "import torch, numpy; print(torch.__version__)"]
    assert subprocess.run(sees, capture_output=True, text=True, check=True).stdout == f"{torch.__version__}\n"


def test_fitted_layers_apply_to_every_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, Any]] = []

    def measured(system: str, job: Job, *_: Any) -> Record:
        asked.append((system, job.layers))
        return run_of(system, 100 + len(asked), job.precision, layers=6)

    monkeypatch.setattr(gpu, "measure", measured)
    options = [
        "--cases",
        "llama3-8b-slice",
        "--layers",
        "llama3-8b-slice=fit",
        "--systems",
        "megascale",
        "megatron-core",
    ]
    options += ["--rounds", "2", "--precisions", "bf16", "--no-gemm", "--results", str(tmp_path / "r.json")]
    assert gpu.main([*options, "--python", f"megatron-core={sys.executable}"]) == 0
    assert asked == [("megascale", "fit"), ("megatron-core", 6), ("megascale", 6), ("megatron-core", 6)]


def test_results_survive_a_killed_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(system: str, job: Job, *_: Any) -> Record:
        if job.case == "llama3-8b-slice":
            raise KeyboardInterrupt
        return run_of(system, 100, job.precision, case=job.case, layers=16)

    monkeypatch.setattr(gpu, "measure", measured)
    kept = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        gpu.main(
            ["--systems", "megascale", "--rounds", "1", "--precisions", "bf16", "--no-gemm", "--results", str(kept)]
        )
    assert [run["case"] for run in json.loads(kept.read_text())["runs"]] == ["llama3-1b"]


@pytest.mark.slow
@NEEDS_PEERS
def test_a_tiny_case_by_megascale_and_megatron_core(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- {gpu_table.REGION}: begin -->\n<!-- {gpu_table.REGION}: end -->\n")
    words = ["--small", "--cases", "gpt3-175b-slice", "--systems", "megascale", "megatron-core", "--rounds", "1"]
    words += ["--precisions", "bf16", "--peers", str(PEERS), "--results", str(tmp_path / "r.json")]
    assert gpu.main([*words, "--markdown", str(page), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    ours, theirs = shown["runs"]
    assert (ours["system"], theirs["system"]) == ("megascale", "megatron-core")
    assert "failure" not in ours and "failure" not in theirs, theirs
    assert theirs["step_s"]["count"] == ours["step_s"]["count"] == 20
    assert theirs["losses"][0] == pytest.approx(ours["losses"][0], rel=0.02)
    assert theirs["how"].startswith("megatron-core 0.16")
    assert [rate["shape"] for rate in shown["gemm"]["rates"]][:1] == ["64x64x64"]
    assert page.read_text().count("| gpt3-175b-slice, 2 layers |") == 2 + 1, "and its shares"


@pytest.mark.slow
@NEEDS_PEERS
@pytest.mark.parametrize(
    ("case", "refusal"), [("gpt3-175b-slice", "torchtitan has no such model: norm=layernorm"), ("llama3-1b", "")]
)
def test_a_tiny_case_by_torchtitan(case: str, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_of("torchtitan", small=True)
    if python is None:
        pytest.skip("torchtitan is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = measure("torchtitan", Job(case, "bf16", 20, 2, small=True, patches=PEERS), python, 300, str(tmp_path))
    if refusal:
        assert result["failure"].startswith(refusal)
    else:
        assert result["tokens_per_s"] > 0, result
        assert result["losses"][0] == pytest.approx(6.2, rel=0.05)


@NEEDS_PEERS
def test_megatron_core_has_no_parallel_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job = Job("megascale-175b-slice", "bf16", 20, 2, small=True, patches=PEERS)
    result = measure("megatron-core", job, Path(sys.executable), 300, str(tmp_path))
    assert result["failure"] == "megatron-core has no parallel block"
    assert result["layers"] == 2
