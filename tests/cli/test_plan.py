"""`megascale plan` as a user meets it."""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.cli.main import main
from tests.marks import only_quick_rows
from tests.runs import GPT, settings, write_config

BIG = "configs/gpu/megascale-175b.toml"
JOB = ["plan", BIG, "--gpus", "12288", "--hardware", "a100-80g-roce"]
KEYS = {
    "fits", "memory_bytes", "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu_full", "mfu_causal", "bubble",
    "exposed_s", "layout",
}  # fmt: skip


def answer(capsys: pytest.CaptureFixture[str], *more: str, job: list[str] = JOB) -> dict:
    assert main([*job, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_what_machines_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, "--tokens", "300e9", "--sweep", "3072,6144")
    assert set(report) >= KEYS
    assert report["fits"] is True
    memory = report["memory_bytes"]
    assert memory.pop("total") == sum(memory.values()) == max(report["memory_bytes_by_stage"])
    assert report["layout"]["dp"] == 192
    assert report["step_time_s"] == pytest.approx(sum(report["causes_s"].values()))
    assert report["tokens_per_s_per_gpu"] * 12288 == pytest.approx(report["tokens_per_s"])
    assert report["job"]["days"] == pytest.approx(300e9 / report["tokens_per_s"] / 86400)
    job = report["job"]
    longer = job["days_with_failures"] / job["days"]
    assert job["gpu_hours_with_failures"] / job["gpu_hours"] == pytest.approx(longer)
    assert longer > 1
    assert [each["gpus"] for each in report["sweep"]] == [3072, 6144]
    assert report["sweep"][0]["step_time_s"] > report["sweep"][1]["step_time_s"] > report["step_time_s"]


def test_it_answers_at_once_and_without_torch() -> None:
    code = "import sys; from megascale.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *JOB], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "megascale-175b: 174.77B parameters, tp 8 sp x pp 8 (vpp 6) x dp 192 = 12288 x a100-80g-roce" in done.stdout
    for words in ("MFU", "fits", "GEMMs", "pipeline bubble", "expected error"):
        assert words in done.stdout


def test_a_timeline_is_one_that_viewers_open(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    report = answer(capsys, "--timeline", str(path), job=[*JOB[:2], "--gpus", "256", *JOB[4:], "batch.global=96"])
    slices = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    assert {each["cat"] for each in slices} >= {"compute", "pp", "dp"}
    assert len([each for each in slices if each["cat"] == "compute"]) == 8 * (6 * 24 * 2 + 2)
    assert max(each["ts"] + each["dur"] for each in slices) / 1e6 == pytest.approx(report["step_time_s"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_timeline_has_the_exchanges_of_a_shared_vocabulary(
    schedule: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, chunks = tmp_path / "step.json", 2 if schedule == "zb_v" else 1
    keys = ["parallel.pp=4", f"parallel.vpp={chunks}", f"parallel.schedule={schedule}", "parallel.vocab_pp=2"]
    answer(capsys, "--timeline", str(path), *keys, job=LLAMA)
    names = {item["name"] for item in json.loads(path.read_text())["traceEvents"]}
    assert any(name.startswith("pp.exchange vocabulary") for name in names)


@pytest.mark.parametrize("keys", [
    ["parallel.vocab_pp=1", "model.exits=[4]"],
    ["parallel.skip_ratio=0.5", "parallel.schedule=gpipe"],
    ["parallel.vocab_pp=1", "parallel.vpp=2", "parallel.schedule=v_half"],
])  # fmt: skip
def test_a_plan_needs_no_data_and_has_the_other_rules(keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "parallel.pp=4", *keys]) == 2
    assert "  -> " in capsys.readouterr().err


def test_a_timeline_changes_no_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert answer(capsys, "--timeline", str(tmp_path / "step.json"), job=LLAMA) == answer(capsys, job=LLAMA)


def test_on_a_timeline_no_rank_computes_while_it_waits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    answer(capsys, "--timeline", str(path), job=LLAMA)
    slices = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    (thread,) = {each["tid"] for each in slices if each["cat"] == "compute" and each["pid"] == 0}
    own = sorted((each["ts"], each["dur"]) for each in slices if each["tid"] == thread)
    assert len(own) > sum(each["cat"] == "compute" and each["pid"] == 0 for each in slices), "it waits as well"
    for (start, took), (following, _) in itertools.pairwise(own):
        assert start + took <= following + 1e-3


def test_a_picture_is_a_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    answer(capsys, "--plot", str(path), "--sweep", "6144,12288")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main([*JOB, "--plot", str(tmp_path / "plan.pdf")]) == 2
    assert "plan.pdf: the plot is a PNG  -> give a name that ends in .png" in capsys.readouterr().err


def test_exact_is_a_dry_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = str(write_config(settings(GPT, tmp_path, parallel__pp=2, parallel__tp=2), tmp_path / "run.toml"))
    job = ["plan", config, "--gpus", "8", "--hardware", "a100-80g", "train.precision=bf16"]
    report, formulas = answer(capsys, "--exact", job=job), answer(capsys, job=job)
    (rank, *_) = report["exact"]["ranks"]
    assert report["memory_bytes"]["total"] == max(each["memory_bytes"]["total"] for each in report["exact"]["ranks"])
    for kind in ("parameters", "optimizer"):
        assert report["memory_bytes"][kind] == formulas["memory_bytes"][kind]
    assert rank["flops"]
    assert rank["communication"]["tp all_reduce"]["calls"] > 0


def test_sharded_weights_need_less_memory_and_hide_from_a_number_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", "configs/gpu/llama3-8b.toml", "--gpus", "64", "--hardware", "h100"]
    own, sharded = (answer(capsys, f"parallel.zero={zero}", job=job) for zero in (2, 3))
    assert sharded["fits"] and sharded["memory_bytes"]["total"] < own["memory_bytes"]["total"]
    assert sharded["memory_bytes"]["optimizer"] == pytest.approx(own["memory_bytes"]["optimizer"], rel=0.01)
    assert sharded["step_time_s"] > own["step_time_s"]
    (note,) = set(sharded["notes"]) - set(own["notes"])
    assert re.fullmatch(r"gathers of weights hide from [0-9,]+ tokens a micro-batch on: it has 8,192", note)


def test_a_dry_run_is_refused_for_a_stack_with_other_fp8_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["configs/gpu/llama3-8b.toml", "train.precision=fp8", "--gpus", "64", "--hardware", "h100"]
    assert main(["plan", *words, "--stack", "nemo-2024", "--exact"]) == 2
    assert "--exact: nemo-2024 stores FP8 weights instead of bf16 ones" in capsys.readouterr().err


def test_a_run_that_does_not_fit_ends_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB[:2], "--gpus", "8", "--hardware", "a100-80g", "parallel.pp=1", "parallel.vpp=1"]) == 2
    out, err = capsys.readouterr()
    assert "does not fit" in out
    assert len(err.splitlines()) == 1
    assert "does not fit" in err
    assert "no layout on 8 x a100-80g with parallel.pp, parallel.vpp as given fits" in err


@pytest.mark.slow
def test_json_where_nothing_fits_has_the_smallest_plan(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", "configs/gpu/llama3-70b.toml", "--gpus", "8", "--hardware", "a100-40g", "--search", "--json"]
    assert main(job) == 2
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert set(report) >= KEYS and report["fits"] is False and report["search"]["best"] == []
    assert report["memory_bytes"]["total"] > report["memory_limit_bytes"] and "no layout on 8 x a100-40g fits" in err
    assert report["suggestion"] == err.rstrip()
    larger = err.split("64 devices would do, ")[1].split(", a shorter sequence")[0].split()
    assert set(larger) >= {"parallel.tp=8", "parallel.zero=3", "train.recompute=full"}
    assert main([*job[:2], "--gpus", "64", *job[4:6], *larger]) == 0


def test_a_key_of_the_command_line_may_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    job = [*LLAMA[:4], "--hardware", "v100", "batch.global=256", "parallel.zero=2", "parallel.tp=1", "parallel.pp=1"]
    assert main(job) == 2
    err = capsys.readouterr().err
    assert "no layout on 64 x v100 with parallel.tp, parallel.pp, parallel.zero as given fits, the least is " in err
    assert ": other values of parallel.tp, parallel.pp, parallel.zero, " in err and err.rstrip().endswith(
        "or a smaller model"
    )
    assert main([*job[:-2], "--search", "parallel.pp=5"]) == 2
    legal = "no layout on 64 devices with parallel.pp, parallel.zero as given is legal: "
    assert capsys.readouterr().err.startswith(legal)


@pytest.mark.parametrize(("count", "near"), only_quick_rows([(101, 100), (1000000, 903168)], (101, 100)))
def test_numbers_of_devices_with_a_layout_are_suggested(
    count: int, near: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["plan", "configs/gpu/gpt3-175b.toml", "--hardware", "a100-80g", "--search", "batch.global=96"]
    assert main([*job, "--gpus", str(count)]) == 2
    said = f"no layout on {count} devices is legal: {near} devices, or another batch.global"
    assert said in capsys.readouterr().err


def test_a_near_number_may_have_more_stages_than_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    base, layers = Path("configs/gpu/llama3-8b.toml").resolve(), [1] * 12 + [0]
    text = f'extends = "{base}"\n[model]\nnum_layers = 12\n[parallel]\ntp = 1\nsp = false\npp = 13\n'
    own.write_text(f"{text}layers_per_chunk = {layers}\n[batch]\nglobal = 8\n")
    job = ["plan", str(own), "--hardware", "h100", "--search", "parallel.pp=13", "--gpus"]
    assert main([*job, "25"]) == 2
    assert "other values of parallel.pp, 26 devices, or" in capsys.readouterr().err
    assert main([*job, "26", *FEW_LAYOUTS]) == 0


def test_a_plan_that_no_number_of_devices_can_fix(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", "configs/gpu/llama3-70b.toml", "--gpus", "32", "--hardware", "a100-40g"]
    keys = ("parallel.cp", "parallel.pp", "parallel.schedule", "batch.micro", "train.recompute", "parallel.zero")
    fixed = zip(keys, (1, 4, "interleaved_1f1b", 4, "none", 1), strict=True)
    assert main([*job, *(f"{key}={value}" for key, value in fixed)]) == 2
    others = ", ".join(keys)
    assert f", and 64 times as many devices would not do: other values of {others}, a sh" in capsys.readouterr().err


LLAMA_405B = """
name = "llama3-405b"
extends = "{base}"
[model]
preset = "llama3-405b"
[parallel]
tp = 8
sp = true
pp = 16
vpp = 8
[batch]
global = 2048
[optimizer]
lr = 8e-5
"""


def test_the_embedding_and_the_head_may_be_chunks_of_their_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """126 layers in 128 chunks: Llama team 2024, 3.3.2."""
    own = tmp_path / "own.toml"
    own.write_text(LLAMA_405B.format(base=Path("configs/gpu/base.toml").resolve()))
    job = ["plan", str(own), "--gpus", "16384", "--hardware", "h200"]
    report = answer(capsys, job=job)
    assert (report["layout"]["pp"], report["layout"]["vpp"], report["fits"]) == (16, 8, True)
    assert report["layers_per_chunk"] is None
    cut = [0, *[1] * 126, 0]
    given = answer(capsys, f"parallel.layers_per_chunk={cut}".replace(" ", ""), job=job)
    assert given == report | {"layers_per_chunk": cut}
    assert main([*job, "parallel.vpp=9"]) == 2
    assert "126 layers are too few for pp x vpp = 16 x 9 chunks  -> pp x vpp at most 128" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_replaces_an_illegal_layout_of_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own, base = tmp_path / "own.toml", Path("configs/gpu/llama3-8b.toml").resolve()
    job = ["plan", str(own), "--gpus", "16", "--hardware", "h100", "batch.global=32"]
    own.write_text(f'extends = "{base}"\n')
    report = answer(capsys, "--search", job=job)["search"]
    own.write_text(f'extends = "{base}"\n[parallel]\ntp = 3\npp = 5\nvpp = 99\nlayers_per_chunk = [7]\n')
    assert main(job) == 2
    assert "1 numbers for pp x vpp = 495 chunks" in capsys.readouterr().err
    assert answer(capsys, "--search", job=job)["search"] == report
    assert main([*job, "--search", "model.num_kv_heads=7"]) == 2
    assert "32 heads cannot share 7 key-value heads" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_keeps_the_chunks_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", "configs/gpu/llama3-70b.toml", "--gpus", "64", "--hardware", "h100", "--search"]
    cut = f"parallel.layers_per_chunk={[3, *[4] * 18, 5]}".replace(" ", "")
    for each in answer(capsys, cut, job=job)["search"]["best"]:
        assert each["layout"]["pp"] * each["layout"]["vpp"] == 20


def test_a_sweep_is_in_order_or_says_what_is_impossible(capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, "--sweep", "128,32,128", job=LLAMA)["sweep"]
    assert [each["gpus"] for each in report] == [32, 128]
    assert [each["layout"]["dp"] for each in report] == [16, 64]
    assert report[0]["memory_bytes"] > report[1]["memory_bytes"]
    assert main([*LLAMA, "--sweep", "64,100,33"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("--sweep 33: ") and lines[1].startswith("--sweep 100: ")
    assert "batch.global: 256 is not divisible by micro x dp = 1 x 50" in lines[1]


def test_doubtful_estimates_have_a_note(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def notes(*more: str, job: list[str] = LLAMA) -> str:
        return "\n".join(answer(capsys, *more, job=job)["notes"])

    assert notes("--stack", "megascale-2024", job=JOB) == ""
    unmeasured, exposed = notes(job=JOB).splitlines()
    assert unmeasured.startswith("megascale was never measured on a100-80g-roce")
    assert exposed.startswith("batch.micro = 1 gives GEMMs of 256 rows, fewer than 512")
    assert "no published step tells the error of plans for 64 x mi250x" in notes("--hardware", "mi250x")
    assert "checkpoint.every = 0: 5000 steps" in notes("train.steps=5000", "checkpoint.every=0", "data.mock=false")
    few = ["configs/quickstart.toml", "--hardware", "h100", "--gpus"]
    assert notes(job=["plan", *few, "4"]) == "no published step tells the error of plans for 4 x h100"
    assert main(["plan", *few, "4"]) == 0
    assert "(error unknown)" in capsys.readouterr().out
    own = tmp_path / "own.toml"
    own.write_text('attention = "flash2"\n')
    assert notes("--stack", str(own)).startswith("own was never measured on h100")
    assert "the scores that megatron-2021 saves for backward" in notes("--stack", "megatron-2021")


def test_policies_of_memory_are_chosen_and_their_writes_wear_drives(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layout = (
        "parallel.tp=1",
        "parallel.sp=false",
        "parallel.pp=2",
        "parallel.vpp=1",
        "batch.global=64",
        "batch.micro=2",
    )
    job = ["plan", "configs/gpu/llama3-8b.toml", "--gpus", "8", "--hardware", "h100", *layout]
    kept, chosen = answer(capsys, job=[*job[:-1], "batch.micro=1"]), answer(capsys, "train.memory=auto", job=job)
    assert kept["memory_policies"] is None and kept["drive_wear"] is None
    assert len(chosen["memory_policies"]) == 32 and chosen["fits"]
    assert main([*job, "train.memory=auto"]) == 0
    assert "train.memory: layers 0-" in capsys.readouterr().out
    files = 'train.memory=["nvme","keep"]', f"train.memory_dir={tmp_path}"
    moved = answer(capsys, *files, job=job)
    assert moved["drive_wear"]["step"] == 8 // 2 * moved["moved_bytes"]["nvme"] > 0  # 8 micro-batches, 2 in flight
    assert main([*job, *files]) == 0
    said = capsys.readouterr().out
    assert "train.memory: nvme, keep by turns" in said
    assert "its 8 drives reach their rating of 7,000 TB each in" in said
    assert main([*job, "train.memory=auto", "train.memory_limit=1000000000"]) == 2
    assert "train.memory: no policies fit: a rank of stage 0 needs" in capsys.readouterr().err


def test_dropout_materialises_scores_in_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    job = [*LLAMA, "model.seq_length=2048", "parallel.tp=8"]
    without, report = answer(capsys, job=job), answer(capsys, "model.dropout=0.1", job=job)
    unfused = answer(capsys, "--stack", "megatron-2021", job=job)
    assert report["memory_bytes"]["activations"] > 1.5 * without["memory_bytes"]["activations"]
    assert report["causes_s"]["attention"] > 2 * without["causes_s"]["attention"]
    assert report["causes_s"]["attention"] == pytest.approx(unfused["causes_s"]["attention"], rel=0.2)
    assert "attention with dropout forms all scores" in "\n".join(report["notes"])


def test_a_device_without_bf16_gemms_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA[:4], "--hardware", "v100", "batch.global=256", "train.recompute=full"]) in (0, 2)
    assert "v100 multiplies no bf16: planned as fp16" in capsys.readouterr().out
    assert main(LLAMA) == 0
    assert "planned as" not in capsys.readouterr().out


def test_an_alternative_that_fits_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", "configs/gpu/llama3-8b.toml", "--gpus", "8", "--hardware", "a100-40g", "batch.global=64"]
    assert main([*job, "parallel.tp=1", "parallel.sp=false", "parallel.vpp=1"]) == 2
    report = capsys.readouterr().err.split("; ")[1].removesuffix(" would fit\n").split()
    assert main([*job, *report]) == 0
    assert "parallel.tp=" in report[0]


def test_an_alternative_unsets_conflicting_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = f'extends = "{Path("configs/gpu/llama3-8b.toml").resolve()}"\n'
    parallel = "[parallel]\ntp = 1\nsp = false\npp = 2\nvpp = 2\n"
    train = '[train]\nrecompute = "selective"\nrecompute_ops = ["norm"]\n'
    own = tmp_path / "own.toml"
    own.write_text(text + parallel + "layers_per_chunk = [7, 9, 9, 7]\n" + train)
    assert main(["plan", str(own), "--gpus", "8", "--hardware", "a100-40g", "batch.micro=2"]) == 2
    report = capsys.readouterr().err.split("; ")[1].removesuffix(" would fit\n").split()
    assert report[-2:] == ["parallel.layers_per_chunk=auto", "train.recompute_ops=auto"]
    assert main(["plan", str(own), "--gpus", "8", "--hardware", "a100-40g", *report]) == 0


def test_an_alternative_sets_dp_where_the_file_sets_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(f'extends = "{Path("configs/gpu/llama3-8b.toml").resolve()}"\n[parallel]\ntp = 2\ndp = 4\n')
    job = ["plan", str(own), "--gpus", "8", "--hardware", "a100-40g", "--json", "parallel.vpp=1"]
    assert main(job) == 2
    report = json.loads(capsys.readouterr().out)["suggestion"].removesuffix(" would fit").split()
    assert main([*job, *report]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    own.write_text(own.read_text().replace("dp = 4", ""))
    assert main(job) == 2  # else as few as there are devices, in a sweep too
    report = json.loads(capsys.readouterr().out)["suggestion"].removesuffix(" would fit").split()
    assert main([*job, *report, "--sweep", "16,32"]) == 0


def test_an_alternative_names_the_number_of_devices_if_nothing_else_does(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", "configs/gpu/llama3-8b.toml", "--hardware", "a100-80g", "parallel.pp=4", "batch.micro=8", "--json",
           "parallel.vpp=1"]  # fmt: skip
    assert main([*job, "--sweep", "16,32"]) == 2
    report = json.loads(capsys.readouterr().out)["suggestion"].removesuffix(" would fit").split()
    assert report[-2:] == ["--gpus", "8"] or report[-2:] == ["--gpus", "4"]
    assert main([*job, *report, "--sweep", "16,32"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--hardware", "a100"], "there is no profile 'a100'"),
        (["--stack", "megatron"], "there is no profile 'megatron'"),
        (["--gpus", "100"], "100"),
        (["train.precision=fp8"], "multiplies no fp8"),
    ],
)
def test_mistakes_are_a_line(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *more]) == 2
    assert words in capsys.readouterr().err


def test_data_need_not_be_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    job = ["plan", "configs/quickstart.toml", "--gpus", "8", "--hardware", "a100-80g", "data.train=nowhere"]
    report = answer(capsys, "--search", "--output", str(path), *FEW_LAYOUTS, job=job)
    assert report["fits"]
    assert "nowhere" in path.read_text()


LLAMA = ["plan", "configs/gpu/llama3-8b.toml", "--gpus", "64", "--hardware", "h100", "batch.global=256"]
FEW_LAYOUTS = ["parallel.schedule=1f1b", "parallel.vpp=1", "parallel.cp=1", "parallel.zero=1", "batch.micro=1"]


def test_a_search_writes_the_fastest_and_explains_the_rest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    report = answer(capsys, "--search", "--output", str(path), *FEW_LAYOUTS, job=LLAMA)
    best = report["search"]["best"]
    assert len(best) == 10
    assert best[0]["layout"] == report["layout"]
    assert [each["step_time_s"] for each in best] == sorted(each["step_time_s"] for each in best)
    assert all(each["slower_by"] for each in best[1:])
    assert all(each["memory_bytes"] <= report["memory_limit_bytes"] for each in best)
    again = answer(capsys, job=["plan", str(path), *LLAMA[2:]])
    assert (again["layout"], again["step_time_s"]) == (report["layout"], report["step_time_s"])


def test_a_search_keeps_the_keys_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, "--search", "parallel.tp=2", "train.recompute=full", *FEW_LAYOUTS, job=LLAMA)
    for each in report["search"]["best"]:
        assert (each["layout"]["tp"], each["layout"]["recompute"]) == (2, "full")


class Terminal(io.StringIO):
    """A terminal in place of stderr."""

    def isatty(self) -> bool:
        return True


def test_a_search_says_on_a_terminal_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a line that is rewritten, and nowhere else."""
    job = ["plan", "configs/quickstart.toml", "--gpus", "2", "--hardware", "a100-80g", "--search", "parallel.tp=1",
           "parallel.pp=1", "parallel.cp=1", "parallel.zero=1"]  # fmt: skip
    assert main(job) == 0
    piped = capsys.readouterr()
    assert piped.err == "" and "legal layouts" in piped.out
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert main(job) == 0
    assert "\r" in terminal.getvalue() and terminal.getvalue().endswith("\x1b[1A\x1b[2K"), "and is removed"
    assert terminal.getvalue().count("\n") == 1
    assert re.search(r"[\d,]+ of [\d,]+ layouts, by their bounds: \S+ s", terminal.getvalue()), "the last line"
    assert capsys.readouterr().out == piped.out


def test_blocks_of_tokens_are_shown_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", "configs/gpu/qwen3-235b-a22b.toml", "--gpus", "256", "--hardware", "h100"]
    for keys, words in (([], "dp 8 (ep 8) ="), (["moe.token_blocks=4"], "dp 8 (ep 8 in 4 blocks) =")):
        assert main([*job, *keys]) == 0
        assert words in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--output", "best.toml"], ["--search", "--gpus"]])
def test_options_that_need_another(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", BIG, "--hardware", "h100", *(more if more[-1] != "--gpus" else more[:-1])]
    with pytest.raises(SystemExit) as ended:
        main(job)
    assert ended.value.code == 2
    assert "--search" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--timeline", "--plot"])
def test_a_file_that_cannot_be_written_is_a_line(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "below", Path("/dev/null"), Path("/proc/one.png")):
        assert main([*LLAMA, option, str(path)]) == 2
        assert f"{path}: cannot be written" in capsys.readouterr().err
    assert main([*LLAMA, option, str(tmp_path / "new" / "one.png")]) == 0
    assert (tmp_path / "new" / "one.png").is_file()


def test_mfu_is_against_the_peak_that_a_run_is_measured_against(capsys: pytest.CaptureFixture[str]) -> None:
    bf16, fp8 = (answer(capsys, f"train.precision={name}", job=LLAMA) for name in ("bf16", "fp8"))
    ratio = fp8["tokens_per_s"] / bf16["tokens_per_s"]
    assert fp8["mfu_full"] == pytest.approx(bf16["mfu_full"] * ratio / 2, rel=1e-3)


def test_memory_by_kind_is_near_the_dry_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    size = {"model__num_layers": 8, "model__seq_length": 256, "model__hidden_size": 256, "model__vocab_size": 1024}
    size |= {"batch__global": 2}
    config = str(write_config(settings(GPT, tmp_path, **size), tmp_path / "run.toml"))
    job = ["plan", config, "--gpus", "1", "--hardware", "a100-80g", "train.precision=bf16"]
    formulas, exact = answer(capsys, job=job)["memory_bytes"], answer(capsys, "--exact", job=job)["memory_bytes"]
    assert formulas["total"] == pytest.approx(exact["total"], rel=0.02)
    assert formulas["activations"] == pytest.approx(exact["activations"], rel=0.15)


def test_a_job_that_never_ends_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--mtbf", "0.001", "--tokens", "1e12"]) == 0
    assert "it never ends" in capsys.readouterr().out
    assert answer(capsys, "--mtbf", "0.001", "--tokens", "1e12", job=LLAMA)["job"]["days_with_failures"] is None
