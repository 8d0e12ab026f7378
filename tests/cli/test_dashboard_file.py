"""`megascale dashboard --file` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.core.errors import Exit
from megascale.operate.show.charts.shapes import REPORT_START
from tests.operate.show.folders import make_run
from tests.operate.show.stores import make_stored_run


def test_a_report_is_written_and_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = make_stored_run(tmp_path, steps=20)
    output = tmp_path / "out.html"
    for _ in range(2):
        assert main(["dashboard", str(run), "--file", str(output)]) == Exit.OK
        assert capsys.readouterr().out.startswith(f"{output}: ")
        assert output.read_bytes().startswith(REPORT_START)
    assert "<h2>Timeline</h2>" in output.read_text()


def test_a_run_without_a_store_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert main(["dashboard", str(run), "--file", str(run / "report.html")]) == Exit.OK
    assert "no event store" in (run / "report.html").read_text()


def test_a_damaged_file_of_the_store_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = make_stored_run(tmp_path, steps=20)
    file = next((run / "events" / "events").iterdir())
    file.write_bytes(file.read_bytes()[:100])
    note = f"{file} is damaged; its rows are missing; remove it"
    assert main(["dashboard", str(run), "--file", str(run / "report.html")]) == Exit.OK
    assert capsys.readouterr().err.count(f"WARNING: {note}\n") == 1
    assert f"<p class='note'>{note}</p>" in (run / "report.html").read_text()
    assert main(["diagnose", str(run), "--slow"]) == Exit.OK
    assert capsys.readouterr().err == f"WARNING: {note}\n"


def test_no_other_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    other = tmp_path / "mine.html"
    other.write_text("<html>")
    with pytest.raises(SystemExit) as ended:
        main(["dashboard", str(run), "--file", str(other)])
    assert ended.value.code == Exit.CONFIG
    assert "was not written by this command" in capsys.readouterr().err
    assert other.read_text() == "<html>"


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    assert main(["dashboard", str(run), "--file", str(tmp_path / "absent" / "a.html")]) == Exit.CONFIG
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--port", "8051"], ["--base-path", "/proxy/"], ["--host", "::1"]])
def test_options_of_the_server_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    assert main(["dashboard", str(run), "--file", str(tmp_path / "a.html"), *words]) == Exit.CONFIG
    assert f"{words[0]}: is of a server  -> leave out --file" in capsys.readouterr().err


def test_a_file_is_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    assert main(["dashboard", str(run), str(run), "--file", str(tmp_path / "a.html")]) == Exit.CONFIG
    assert "--file: is of one run  -> give one RUN" in capsys.readouterr().err
