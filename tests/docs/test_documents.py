"""What the documents say is there is there, and what they tell to type runs."""

from __future__ import annotations

import itertools
import re
import runpy
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.cli import launch
from megascale.cli.command_table import COMMANDS
from megascale.cli.main import main, parse
from megascale.config.loading import load_config
from megascale.core.errors import ConfigError, MegascaleError
from megascale.core.rank import Rank
from megascale.data.prepare.python_corpus import make_corpus
from megascale.record.log_files import log_of_rank
from tests.marks import only_quick

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TEXTS = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tools").rglob("*.py")}
TOOLS = sorted(
    path for path, text in TEXTS.items() if "__main__" in text and re.search(r"(Argument|Command)Parser\(", text)
)
FOR_USERS = (
    "tools/corpus.py", "tools/demo_observe.py", "tools/test_gpu.py", "tools/bench/peers.py",
    "tools/bench/gpu.py",
)  # fmt: skip
"""Tools whose help has an example and a page, as that of the commands."""
RUN_ELSEWHERE = ("data.md", "checkpointing.md", "models.md", "first-hour.md")
"""Pages that make the files of their commands: tests/cli/test_data.py, tests/cli/test_quickstart.py, and beside this
file test_models.py and test_first_hour.py run them."""
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
QUOTED = re.compile(r"`([^`\n]+)`")
NAMED_TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")
FILE = re.compile(r"(?:\.?[\w-]+/)+[\w.-]+\.(?:py|toml|md|sh|sbatch|csv)|(?:[\w-]+/)*[\w-]+\.(?:py|sh|sbatch)")


def bash_lines(page: Path) -> Iterator[list[str]]:
    """The commands of a page, word by word."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for quoted in QUOTED.findall(page.read_text(encoding="utf-8")):
        for name in FILE.findall(quoted):
            if "/" in name and not name.startswith(("runs/", "data/quickstart", "build/")):
                assert (ROOT / name).exists() or (ROOT / "megascale" / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for path, name in NAMED_TEST.findall(page.read_text(encoding="utf-8")):
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_each_tool_has_help(tool: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(tool), "--help"])
    monkeypatch.setattr(sys, "path", [str(tool.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tool), run_name="__main__")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "usage:" in out
    name = tool.relative_to(ROOT).as_posix()
    if name in FOR_USERS:
        examples, pages = (
            re.findall(r"^  python (\S+)", out, re.MULTILINE),
            re.findall(r"^page: (\S+)$", out, re.MULTILINE),
        )
        assert examples == [name] and (ROOT / pages[0]).is_file()


def code_lines(text: str) -> list[str]:
    """The lines of code, without comments and indentation."""
    lines = (line.partition("  # ")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def test_the_step_that_is_shown_is_the_one_that_runs() -> None:
    """The page leaves lines out; those that it shows are lines of the source, in their order."""
    (shown,) = re.findall(r"```python\n(def train_step.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    source = (ROOT / "megascale/train/step.py").read_text()
    own = iter(code_lines(source[source.index("def train_step") : source.index("def is_logged_step")]))
    for line in code_lines(shown):
        assert line in own, line


def test_every_python_block_is_run_or_compared() -> None:
    """The step above is compared with the source, the script below is run; tests/docs/test_extending.py runs the
    examples of docs/extending.
    """
    pages = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]
    assert {page.relative_to(ROOT).as_posix() for page in pages if page.parent.name != "extending"} == {
        "docs/architecture.md",
        "docs/trace.md",
    }


def test_the_script_that_reads_flight_records(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trace.md").read_text(), re.DOTALL)
    with log_of_rank(Path("a run of the documents"), Rank(54321, 54322, 0, "host"), {}):
        exec(script, {})
    assert re.search(r"^54321 import 0 \d+\.\d s None$", capsys.readouterr().out, re.MULTILINE)


@pytest.fixture(scope="module")
def quickstart_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository after `make quickstart` has made its data, of which it has a part."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "configs").symlink_to(ROOT / "configs")
    data = folder / "data" / "quickstart"
    make_corpus(ROOT / "megascale/cli", data, 400)  # a small corpus: tests/data/prepare makes that of the library
    for split in ("train", "valid"):
        source, prefix = data / f"{split}.jsonl", str(data / split)
        source.write_text("".join(source.read_text(encoding="utf-8").splitlines(keepends=True)[:100]), encoding="utf-8")
        words = ["--output", prefix, "--tokenizer", str(data / "tokenizer.json"), "--workers", "1"]
        assert main(["data", "prepare", str(source), *words]) == 0
    return folder


def test_configurations_that_are_to_be_trained_are_good(
    quickstart_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run of the documents, whatever starts it, and what the quickstart says to try next."""
    monkeypatch.chdir(quickstart_data)
    page = (ROOT / "megascale/cli/quickstart.py").read_text()
    page = page.replace("{shlex.join([CONFIG, *overrides])}", "configs/quickstart.toml train.precision=bf16")
    after = page[page.index("megascale train configs") :].partition('"""')[0]
    commands = [shlex.split(after.replace("\\\n", " "))]
    commands += [words for path in PAGES if path.name not in RUN_ELSEWHERE for words in bash_lines(path)]
    checked = Counter[str]()
    for words in commands:
        if (run := run_of(words)) is None:
            continue
        program, arguments = run
        checked[program] += 1
        try:
            check_run(program, arguments)
        except (MegascaleError, SystemExit) as error:
            pytest.fail(f"{shlex.join(words)}: {error} {capsys.readouterr().err}")
    assert set(checked) == {"check", "train", "launch", "torchrun.sh", "slurm.sbatch"}


RUNS = ("check", "train", "launch", "torchrun.sh", "slurm.sbatch", "slurm_fault.sbatch")
"""Commands and scripts that take a configuration and start a run."""


def run_of(words: list[str]) -> tuple[str, list[str]] | None:
    """The member of `RUNS` that a line starts, and its arguments; None for another line."""
    for place, word in enumerate(words):
        name = words[place + 1] if word.endswith("megascale") and words[place + 1 :] else Path(word).name
        if name in RUNS:
            first = place + (2 if word.endswith("megascale") else 1)
            return name, list(itertools.takewhile(lambda each: each not in ("&", "|", ">", "&&", ";"), words[first:]))
    return None


def check_run(program: str, arguments: list[str]) -> None:
    """Check what the program would before it starts anything. Raises: MegascaleError, SystemExit"""
    command = program if program in COMMANDS else "launch" if program == "slurm_fault.sbatch" else "check"
    _, options = parse([command, *arguments])
    config = load_config(options.config, options.overrides)
    if command == "launch" and (problems := list(launch.problems(options, config))):
        raise ConfigError(problems)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("megascale launch configs/quickstart.toml parallel.dp=4 --nodes 2", "not divisible"),
        ("megascale launch configs/quickstart.toml --nodes 3", "4 ranks do not divide over 3 nodes"),
        (".venv/bin/megascale train configs/quickstart.toml parallel.tp=3 | head", "parallel.tp"),
        ("NPROC=2 launch/torchrun.sh configs/quickstart.toml train.stops=3 &", "train.stops"),
        ("sbatch --ntasks 4 launch/slurm.sbatch configs/quickstart.toml train.steps=x", "train.steps"),
    ],
)
def test_a_bad_run_in_a_document_would_be_found(
    line: str, message: str, quickstart_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(quickstart_data)
    run = run_of(shlex.split(line))
    assert run is not None
    with pytest.raises(MegascaleError, match=message):
        check_run(*run)


COMMAND_LINES = [
    words
    for page in PAGES
    if page.name not in RUN_ELSEWHERE
    for words in bash_lines(page)
    if words[0].endswith("megascale")
]
PLANS = [words[1:] for words in COMMAND_LINES if words[1] == "plan"]


SEARCHES = [words for words in PLANS if "--search" in words]


@pytest.mark.parametrize("words", only_quick(PLANS, *(words for words in PLANS if words not in SEARCHES)), ids=" ".join)
def test_plans_are_made(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0


SHOWN = re.compile(r"```bash\n([^\n]*)\n```\n\n```text\n(.*?)```", re.DOTALL)
OUTPUTS = [shown for page in PAGES for shown in SHOWN.findall(page.read_text(encoding="utf-8"))]


def test_a_document_shows_output() -> None:
    assert OUTPUTS


@pytest.mark.parametrize(("command", "output"), OUTPUTS, ids=[command for command, _ in OUTPUTS])
def test_output_that_is_shown_is_printed(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page leaves lines out; those that it shows are printed, in their order."""
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0
    printed = iter([line.split() for line in capsys.readouterr().out.splitlines()])
    for line in output.splitlines():
        assert line.split() in printed, line
