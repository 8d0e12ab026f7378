"""The quickstart from corpus to summary."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.cli.quickstart import PROMPT, precision_overrides
from tests.docs.test_documents import bash_lines

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # on slow cores it trains for a quarter of an hour


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the command in a folder with a `.venv` alone; return the folder and the output."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / ".venv").symlink_to(sys.prefix)
    return folder, run(folder)


def run(folder: Path) -> str:
    command = [sys.executable, "-m", "megascale", "quickstart"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_model_learns(made: tuple[Path, str]) -> None:
    folder, _ = made
    records = [json.loads(line) for line in (folder / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    valid = [record["valid_loss"] for record in records if "valid_loss" in record]
    assert valid[0] - valid[-1] > 2.5
    steps = [record for record in records if "loss" in record]
    assert all(0 < record["mfu_causal"] < record["mfu_full"] for record in steps)
    rates = [record["mfu_full"] / record["tokens_per_s"] for record in steps]  # FLOPs of a token over the peak
    assert rates == pytest.approx([rates[0]] * len(rates), rel=1e-3)


def test_it_ends_with_a_text_that_the_model_wrote(made: tuple[Path, str]) -> None:
    """`megascale sample` continues a text of the corpus, with more than the prompt."""
    folder, out = made
    command = "$ megascale sample runs/quickstart --prompt "
    start = out.index(command)
    text = out[start : out.index("\nquickstart: ", start)].partition("\n")[2]
    assert text.startswith(PROMPT) and len(text.strip()) > len(PROMPT) + 20, text
    corpus = (folder / "data/quickstart/valid.jsonl").read_text()
    assert PROMPT in corpus, "the corpus has the prompt"


@pytest.mark.parametrize(("flags", "overrides"), [("fma avx512_bf16", ["train.precision=bf16"]), ("fma avx2", [])])
def test_bf16_where_the_processor_has_it(flags: str, overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t: {flags} sse\n")
    assert precision_overrides(tmp_path / "cpuinfo") == overrides
    assert precision_overrides(tmp_path / "none") == []


def test_the_summary_names_what_is_there(made: tuple[Path, str]) -> None:
    folder, out = made
    summary = out[out.rindex("\nquickstart: ") :]  # the run has this name too
    for name in ("checkpoint ", "metrics ", "--logdir"):
        path = re.search(rf"{name}\s*(\S+)", summary)
        assert path and (folder / path[1]).exists(), summary
    assert re.search(r"nats less\n.* tokens/s, MFU \d+\.\d% \(full attention\), \d+\.\d% \(causal\)", summary)


def test_a_second_time_nothing_is_made_again(made: tuple[Path, str]) -> None:
    folder, first = made
    again = run(folder)
    assert "all 240 steps are done" in again
    assert "modules of" not in again and "data prepare" not in again
    assert again[again.index("  training loss") :] == first[first.index("  training loss") :]


def test_what_the_documents_do_with_its_checkpoints_works(made: tuple[Path, str]) -> None:
    folder, _ = made
    for words in bash_lines(ROOT / "docs/checkpointing.md"):
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == (1 if "diff" in words else 0), (words, done.stderr)
    metrics = folder / "runs/quickstart-120/metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert min(steps) > 120 and max(steps) == 130


def test_what_the_documents_train_trains(made: tuple[Path, str]) -> None:
    """Run the commands of the launch guide with fewer steps."""
    folder, _ = made
    (folder / "launch").symlink_to(ROOT / "launch")
    page = (ROOT / "docs/launch.md").read_text()
    blocks = [b for b in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "megascale train" in b or "torchrun" in b]
    commands = re.sub(r"train\.steps=\d+", "train.steps=2 optimizer.warmup_steps=0 train.eval_every=0", "".join(blocks))
    done = subprocess.run(["bash", "-eu", "-c", commands], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("local", "torchrun", "two-hosts"):
        last = json.loads((folder / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["step"] == 2, name
