"""Standard streams that are closed, or whose disk is full. In locales that lack some characters output is escaped, and
names of files work or are refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.core.errors import Exit
from tests.jobs import job_config
from tests.runs import GPT, settings, write_config

MEGASCALE = f"{sys.executable} -m megascale"
ENV = dict(os.environ, OMP_NUM_THREADS="1")
LAYOUTS = [{}, pytest.param({"parallel__tp": 2}, marks=pytest.mark.slow)]


def run_line(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=ENV, timeout=300, check=False)


def test_a_full_disk_is_said_in_a_line(tmp_path: Path) -> None:
    ended = run_line(f"{MEGASCALE} check {job_config(tmp_path, GPT)} > /dev/full")
    assert ended.returncode == Exit.UNCLASSIFIED
    assert ended.stderr == "megascale: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", ["check {config}", "ckpt list {folder}"])
def test_a_reader_that_has_exited_is_no_mistake(command: str, tmp_path: Path) -> None:
    """Such as head. Commands on checkpoints explain errors of files, and the output is none."""
    (tmp_path / "checkpoints").mkdir()
    words = command.format(config=job_config(tmp_path, GPT), folder=tmp_path).split()
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [*MEGASCALE.split(), *words], stdout=writer, stderr=subprocess.PIPE, text=True, env=ENV, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (Exit.UNCLASSIFIED, "")


def test_closed_streams_are_the_null_device(tmp_path: Path) -> None:
    """The first file to be opened would be what `print` writes to."""
    code = "import os, megascale.cli.main as m; m.open_closed_streams(); "
    code += f"file = os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_RDWR); print('lost'); os.write(2, b'lost'); "
    code += "raise SystemExit(0 if file > 2 else 5)"
    assert run_line(f'{sys.executable} -c "{code}" <&- >&- 2>&-').returncode == Exit.OK
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("layout", LAYOUTS, ids=["alone", "launcher"])
@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", pytest.param("> /dev/full 2>&1", marks=pytest.mark.slow)])
def test_training_goes_on_without_its_output(streams: str, layout: dict, tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **layout, train__steps=3)
    assert run_line(f"{MEGASCALE} train {config} {streams}").returncode == Exit.OK
    assert (tmp_path / "runs" / "test" / "metrics.jsonl").read_text().count('"loss"') == 3


NAME = "naïve 日本 😀"
"""Latin-1 has the ï alone, ASCII nothing; 😀 is beyond 16 bits."""

LOCALES = {
    "C": {"LC_ALL": "C"},
    "POSIX": {"LC_ALL": "POSIX"},
    "ascii file names": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "latin-1": {"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0"},
    "ascii output": {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
}


@pytest.fixture(scope="module")
def locales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the locale of Latin-1, and return its folder."""
    folder = tmp_path_factory.mktemp("locales")
    command = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(folder / "de_DE.ISO-8859-1")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


QUICK = ("ascii file names",)


@pytest.fixture(params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LOCALES])
def variables(request: pytest.FixtureRequest, locales: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "PYTHON")) and k != "LANG"}
    return clean | {"LOCPATH": str(locales), "OMP_NUM_THREADS": "1"} | LOCALES[request.param]


def run(folder: Path, variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "megascale", *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, check=False)
    assert b"Traceback" not in done.stderr + done.stdout, done.stderr.decode(errors="replace")
    return done


def shown(variables: dict[str, str]) -> bytes:
    """NAME in the output's encoding."""
    encoding = variables.get("PYTHONIOENCODING", {"de_DE.ISO-8859-1": "latin-1"}.get(variables["LC_ALL"], "utf-8"))
    if variables.get("PYTHONUTF8") == "0" and variables["LC_ALL"] == "C":
        encoding = "ascii"
    return NAME.encode(encoding, "backslashreplace")


@pytest.mark.parametrize("arguments", [
    ["check", "run.toml", f"data.train={NAME}"],
    pytest.param(["train", "run.toml", f"data.train={NAME}"], marks=pytest.mark.slow),
    pytest.param(["plan", f"{NAME}.toml", "--hardware", "h100"], marks=pytest.mark.slow),
    ["data", "inspect", NAME],
    ["data", "prepare", NAME, "--output", "x", "--tokenizer", "bytes"],
    pytest.param(["data", "prepare", "run.toml", "--output", "x", "--tokenizer", NAME], marks=pytest.mark.slow),
    pytest.param(["ckpt", "list", NAME], marks=pytest.mark.slow),
    ["trace", NAME],
    ["check", "run.toml", f"--{NAME}"],
], ids=" ".join)  # fmt: skip
def test_an_error_names_what_the_output_can_show(
    arguments: list[str], variables: dict[str, str], tmp_path: Path
) -> None:
    write_config(settings(GPT, tmp_path), tmp_path / "run.toml")
    done = run(tmp_path, variables, *arguments)
    assert done.returncode in (2, 3, 4)
    assert shown(variables) in done.stderr, done.stderr


def test_text_and_names_of_datasets_are_shown(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.jsonl").write_text(json.dumps({"text": NAME}) + "\n", encoding="ascii")
    files = [f"{NAME}.jsonl", "--output", NAME]
    prepared = run(tmp_path, variables, "data", "prepare", *files, "--tokenizer", "bytes", "--workers", "1")
    assert prepared.returncode == 0
    assert prepared.stdout.startswith(shown(variables))
    assert {path.name for path in tmp_path.iterdir()} >= {f"{NAME}.{end}" for end in ("bin", "idx", "json", "jsonl")}
    inspected = run(tmp_path, variables, "data", "inspect", NAME)
    assert inspected.returncode == 0
    assert inspected.stdout.count(shown(variables)) == 2  # the name, and the text
    as_json = run(tmp_path, variables, "data", "inspect", NAME, "--json")
    assert json.loads(as_json.stdout)["documents"] == 1
    text = run(tmp_path, variables, "check", str(write_config(settings(GPT, tmp_path), tmp_path / "run.toml")),
               f"output_dir={NAME}", "--show")  # fmt: skip
    assert shown(variables) in text.stdout


@pytest.mark.slow
def test_a_run_trains_in_a_folder_beyond_the_locale(variables: dict[str, str], tmp_path: Path) -> None:
    write_config(
        settings(GPT, tmp_path, observe__tensorboard=True, optimizer__warmup_steps=1, train__steps=2),
        tmp_path / "run.toml",
    )
    done = run(tmp_path, variables, "train", "run.toml", f"output_dir={NAME}", "parallel.dp=2", "checkpoint.every=1")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / NAME / "test" / "tensorboard").iterdir())
    assert NAME in (tmp_path / NAME / "test" / "config.toml").read_text(encoding="utf-8")


def test_a_name_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    write_config(settings(GPT, tmp_path), tmp_path / "run.toml")
    done = run(tmp_path, dict(os.environ), "check", "run.toml", "output_dir=a\udcff")
    assert done.returncode == 2
    assert (
        done.stderr.decode()
        .splitlines()[0]
        .startswith("command line  output_dir: 'a\\udcff': has '\\udcff', which no name of a file in UTF-8 has")
    )
    done = run(tmp_path, dict(os.environ), "sample", "none", "--prompt", "a\udcff")
    assert done.returncode == 2
    assert b"is not UTF-8" in done.stderr
