"""`megascale data` for a user: output, exit status, and files on the disk."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megascale.cli.main import main
from tests.data.datasets import ORIGIN, write_documents
from tests.data.prepare.test_tokenizer import byte_level
from tests.jobs import heed_signals

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-B", "-m", "megascale", "data"]  # -B: a limit of file sizes would cut compiled modules


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with input files."""
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n')
    Path("bad.jsonl").write_text('{"text": "first"}\n{"text": 2}\n')
    Path("empty.txt").touch()
    Path("folder").mkdir()
    Path("garbage.json").write_text("garbage")
    byte_level("<pad>").save("endless.json")
    byte_level("<eod>").save("tokenizer.json")
    return tmp_path


def prepare(*words: str) -> list[str]:
    return ["data", "prepare", "--workers", "1", *words]


REFUSED = {
    ("bad.jsonl", "--output", "out/set", "--tokenizer", "bytes"): "bad.jsonl:2 has a number under 'text', not a text",
    ("good.jsonl", "--output", "out/set", "--tokenizer", "bytes", "--key", "body"): "good.jsonl:1 has no field 'body'",
    ("empty.txt", "--output", "out/set", "--tokenizer", "bytes"): "the input has no text",
    ("good.jsonl", "none.txt", "--output", "out/set", "--tokenizer", "bytes"): "none.txt does not exist",
    (
        "folder",
        "--output",
        "out/set",
        "--tokenizer",
        "bytes",
    ): "folder has no file of .jsonl, .ndjson, .json",
    ("/dev/null", "--output", "out/set", "--tokenizer", "bytes"): "/dev/null is no file",
    ("good.jsonl", "--output", "good.jsonl/set", "--tokenizer", "bytes"): "the folder good.jsonl cannot be made",
    ("good.jsonl", "--output", ".", "--tokenizer", "bytes"): ". is a folder",
    (
        "good.jsonl",
        "--output",
        "out/set",
        "--tokenizer",
        "none.json",
    ): "there is no file none.json  -> a tokenizer.json",
    ("good.jsonl", "--output", "out/set", "--tokenizer", "garbage.json"): "garbage.json is not a tokenizer",
    ("good.jsonl", "--output", "out/set", "--tokenizer", "endless.json"): "endless.json does not say which token ends",
    ("good.jsonl", "--output", "out/set", "--tokenizer", "tokenizer.json", "--eod", "<x>"): "has no token <x> to end",
}


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.parametrize("as_json", [False, True])
def test_mistakes_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], as_json: bool
) -> None:
    status = main(prepare(*words, *(["--json"] if as_json else [])))
    out, err = capsys.readouterr()
    assert (status, out) == (3, "")
    assert REFUSED[tuple(words)] in err
    assert "  -> " in err
    assert err.count("\n") == 1
    assert not list(folder.rglob("*set*"))


@pytest.mark.parametrize("workers", ["0", "-1", "two"])
def test_an_invalid_number_of_workers_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(prepare("good.jsonl", "--output", "set", "--tokenizer", "bytes", "--workers", workers))
    assert caught.value.code == 2
    assert f"argument --workers: '{workers}' is not an integer of 1 or more" in capsys.readouterr().err


def test_prepare_and_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(prepare("good.jsonl", "--output", "out/set", "--tokenizer", "tokenizer.json")) == 0
    assert capsys.readouterr().out == (
        "out/set: 2 documents, 13 tokens from 37 B of input, vocabulary 257\n"
        "documents end with '<eod>', token 256 (the one special token of a usual name in tokenizer.json)\n"
    )
    assert main(["data", "inspect", "out/set", "--documents", "1"]) == 0
    assert capsys.readouterr().out == (
        "out/set: 2 documents, 13 tokens, stored as uint16\n"
        "tokenizer tokenizer.json, vocabulary 257, end of document 256\n"
        "document 0, 6 tokens: 'first<eod>'\n"
    )


def test_json_is_one_object_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(prepare("good.jsonl", "--output", "set", "--tokenizer", "bytes", "--json")) == 0
    out, err = capsys.readouterr()
    made = {"vocab_size": 257, "tokens": 13, "documents": 2, "tokenizer": vars(ORIGIN), "highest_token": 256}
    read = {"files": 1, "bytes": 37, "skipped": {}, "ignored_files": 0, "continued_after": 0}
    assert (json.loads(out), out.count("\n"), err) == (made | read, 1, "")
    assert main(["data", "inspect", "set", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"documents": 2, "tokens": 13, "format": "uint16", "made_with": made}
    assert (out.count("\n"), err) == (1, "")


@pytest.mark.parametrize(
    "words",
    [
        ("prepare", "--output", "set", "--tokenizer", "bytes", "--workers", "1", "pointer.jsonl"),
        ("prepare", "--output", "set", "--tokenizer", "pointer.json", "--workers", "1", "good.jsonl"),
        ("import", "--output", "set", "--dtype", "uint16", "--eod", "0", "pointer.bin"),
        ("import", "--output", "set", "--eod", "0", "pointers"),
    ],
)
def test_a_git_lfs_pointer_is_named_as_such(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("pointers").mkdir()
    for name in ("pointer.jsonl", "pointer.json", "pointer.bin", "pointers/chunk-0-0.bin"):
        Path(name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    assert main(["data", *words]) == 3
    _, err = capsys.readouterr()
    assert " is a git-lfs pointer, not the file itself: `git lfs pull` fetches it  -> " in err and err.count("\n") == 1
    assert not list(folder.rglob("*set*"))


@pytest.mark.parametrize("end", ["idx", "bin", "json"])
def test_a_file_of_a_dataset_that_is_a_pointer_is_named(
    end: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(prepare("good.jsonl", "--output", "set", "--tokenizer", "bytes")) == 0
    Path(f"set.{end}").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    capsys.readouterr()
    assert main(["data", "inspect", "set"]) == 3
    assert f"set.{end} is a git-lfs pointer, not the file itself: `git lfs pull` fetches it" in capsys.readouterr().err


def test_ids_outside_of_the_tokenizers_range_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(prepare("good.jsonl", "--output", "set", "--tokenizer", "bytes")) == 0
    tokens = np.fromfile("set.bin", np.uint16)
    tokens[1] = 60_000
    tokens.tofile("set.bin")
    capsys.readouterr()
    assert main(["data", "inspect", "set"]) == 0
    assert "not shown: ids 60000, outside of the tokenizer's 257 tokens" in capsys.readouterr().out


def test_what_was_skipped_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder/picture.png").touch()
    Path("folder/good.jsonl").write_text(Path("good.jsonl").read_text() + '{"text": ""}\n')
    arguments = prepare("bad.jsonl", "folder", "--output", "set", "--tokenizer", "bytes", "--skip-bad")
    assert main(arguments) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("set: 3 documents, 19 tokens from 80 B of input in 2 files, vocabulary 257\n")
    assert "\nskipped 1 not a text, the first: bad.jsonl:2 has a number under 'text', not a text  -> " in out
    assert "\nskipped 1 empty, the first: folder/good.jsonl:3\n" in out
    assert out.endswith("\ndid not read 1 files of other kinds\n")
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["skipped"]["empty"] == {"count": 1, "first": "folder/good.jsonl:3"}
    assert (facts["files"], facts["ignored_files"]) == (2, 1)


def test_a_custom_end_of_document_token_is_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(prepare("good.jsonl", "--output", "set", "--tokenizer", "endless.json", "--eod", "<pad>")) == 0
    assert main(["data", "inspect", "set"]) == 0
    assert "document 1, 7 tokens: 'second<pad>'\n" in capsys.readouterr().out


@pytest.mark.parametrize("replacement", [None, "garbage.json", "endless.json"])
def test_a_missing_or_changed_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str], replacement: str | None
) -> None:
    main(prepare("good.jsonl", "--output", "set", "--tokenizer", "tokenizer.json"))
    kept = Path("tokenizer.json").read_bytes()
    if replacement:
        Path("tokenizer.json").write_bytes(Path(replacement).read_bytes())
    else:
        Path("tokenizer.json").unlink()
    assert main(["data", "inspect", "set"]) == 0
    assert "names no tokenizer that can be loaded here: give --tokenizer to see text\n" in capsys.readouterr().out
    Path("moved.json").write_bytes(kept)
    assert main(["data", "inspect", "set", "--tokenizer", "moved.json"]) == 0
    assert "'first<eod>'" in capsys.readouterr().out
    assert main(["data", "inspect", "set", "--tokenizer", "endless.json"]) == 3
    assert "endless.json is not the dataset's tokenizer, tokenizer.json" in capsys.readouterr().err


def test_a_dataset_of_another_tool(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_documents(Path("set"), [np.frombuffer(b"text", np.uint8)], ORIGIN, 300)
    Path("set.json").unlink()
    assert main(["data", "inspect", "set"]) == 0
    assert capsys.readouterr().out == (
        "set: 1 documents, 4 tokens, stored as uint16\n"
        "the dataset names no tokenizer that can be loaded here: give --tokenizer to see text\n"
    )
    assert main(["data", "inspect", "set", "--tokenizer", "bytes"]) == 0
    assert "document 0, 4 tokens: 'text'\n" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["file:///tmp/x/set", "s3://bucket/set", "memory://set"])
@pytest.mark.parametrize("verb", ["prepare", "import"])
def test_output_to_a_url_is_refused(verb: str, url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as error:
        main(["data", verb, "good.jsonl", "--output", url, "--tokenizer", "bytes"])
    assert error.value.code == 2 and sorted(folder.rglob("*")) == before
    assert f"{url!r} is a URL: give a path of this host, and copy the files" in capsys.readouterr().err


def test_a_negative_number_of_documents_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "inspect", "set", "--documents", "-5"])
    assert "'-5' is not an integer of 0 or more" in capsys.readouterr().err


def test_a_dataset_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", "memory://none"]) == 3
    assert "  -> check the URL; copy all files of a dataset there\n" in capsys.readouterr().err
    assert main(["data", "inspect", "none"]) == 3
    assert capsys.readouterr().err == "there is no file none.idx  -> `megascale data prepare` makes it\n"


def test_a_full_disk(folder: Path) -> None:
    Path("in.txt").write_text("text" * 10_000)
    done = subprocess.run(
        [*COMMAND, "prepare", "in.txt", "--output", "out/set", "--tokenizer", "bytes", "--workers", "1"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert done.returncode == 3
    assert (
        done.stderr == "out/set cannot be written: File too large  -> `ulimit -f` raises "
        "this process's limit of the size of files and of shared memory\n"
    )
    assert list(Path("out").iterdir()) == []


def start(output: Path) -> subprocess.Popen[str]:
    """Prepare a large file with two workers in a new process group, until the first tokens are on the disk."""
    Path("large.jsonl").write_text((json.dumps({"text": "x" * 5_000}) + "\n") * 20_000)
    process = subprocess.Popen(
        [*COMMAND, "prepare", "large.jsonl", "--output", str(output), "--tokenizer", "bytes", "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    begun = output.with_name(f".{output.name}.bin.part")
    wait_for(lambda: begun.exists() and begun.stat().st_size > 0)
    return process


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited a minute"
        time.sleep(0.01)


def alive(session: int) -> list[str]:
    """List the processes of a session."""
    info = subprocess.run(["ps", "-s", str(session), "-o", "stat=,args="], capture_output=True, text=True, check=False)
    return [line for line in info.stdout.splitlines() if not line.startswith("Z")]


def test_killed_in_the_middle(folder: Path) -> None:
    output = Path("out/set")
    process = start(output)
    assert len(alive(process.pid)) >= 3
    process.kill()
    process.communicate()
    wait_for(lambda: not alive(process.pid))  # its workers have nobody to work for
    assert {path.name.split(".")[0] for path in output.parent.iterdir()} == {""}  # nothing under a final name
    again = main(prepare("good.jsonl", "--output", str(output), "--tokenizer", "bytes"))
    assert again == 0
    assert sorted(path.name for path in output.parent.iterdir()) == ["set.bin", "set.idx", "set.json"]


def test_interrupted_from_the_keyboard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = start(Path("out/set"))
    wait_for(lambda: Path("out/.set.bin.part").stat().st_size > 8 << 20)  # several tasks are done
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted: the same command continues\n")
    wait_for(lambda: not alive(process.pid))
    arguments = ["large.jsonl", "--output", "out/set", "--tokenizer", "bytes"]
    assert main(prepare(*arguments)) == 0
    assert re.search(r"^continues after \d+ documents of an unfinished", capsys.readouterr().err)
    assert main(prepare(*arguments[:1], "--output", "whole", *arguments[3:])) == 0
    for ending in (".bin", ".idx", ".json"):
        assert Path(f"out/set{ending}").read_bytes() == Path(f"whole{ending}").read_bytes()


@pytest.mark.slow
def test_the_commands_of_the_documents_run(tmp_path: Path) -> None:
    pages = (REPOSITORY / "docs" / name for name in ("data.md", "data-order.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = [block.split("```")[0] for block in text.split("```bash\n")[1:]]
    commands = "".join(blocks)
    assert ".venv/bin/megascale data prepare" in commands
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for name in ("tools", "configs", "README.md"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, f"{shlex.quote(commands)}\n{done.stderr.decode()}"
