"""`megascale events --otlp` as a user meets it: a receiver on loopback decodes what comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megascale.cli.main import main
from megascale.core.network import listen
from megascale.core.storage import Location
from megascale.operate.store import otlp
from megascale.operate.store.query import open_store
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.store.otlp_receiver import ReceivedSpan, receiver
from tests.operate.store.span_store import EVENTS, MS, start_ns, write_store
from tests.operate.store.tables import rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("runs") / "a run")


def send(run: Path, *words: str) -> list[ReceivedSpan]:
    with receiver() as found:
        assert main(["events", str(run), "--otlp", found.url, *words]) == 0
    return found.spans


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the one line of an error."""
    assert main(["events", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "  -> " in err
    return err


def test_spans_arrive_with_their_names_times_and_places(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with receiver() as found:
        assert main(["events", str(run), "--otlp", found.url, "--spans", "all", "--ranks", "0-1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == f"{len(found.spans)} spans of 5 steps and 2 ranks sent to {found.url}\n"
    assert {path for path, _ in found.requests} == {"/v1/traces"}
    (step,) = (
        one
        for one in found.spans
        if (one.name, one.attributes["megatron.iteration"], one.attributes["dl.rank"]) == ("megatron.train_step", 4, 1)
    )
    assert (step.start_ns, step.end_ns) == (start_ns(1, 1, 4), start_ns(1, 1, 4) + 90 * MS)
    assert step.attributes["megatron.loss"] == 2.5
    resource = step.resource
    assert (resource["service.name"], resource["megascale.run"], resource["host.name"]) == (
        "megascale",
        "a run",
        "host-1",
    )
    assert (resource["dl.rank"], resource["dl.world_size"]) == (1, 2)
    assert (resource["dl.pipeline_parallel.rank"], resource["dl.pipeline_parallel.size"]) == (1, 2)
    assert resource["dl.tensor_parallel.size"] == 1


def test_a_step_is_one_trace_over_ranks_and_every_parent_came(run: Path) -> None:
    spans = [one for one in send(run, "--spans", "all", "--ranks", "0,1") if one.resource["megascale.attempt"] == 1]
    by_trace: dict[bytes, set[tuple[int, int]]] = {}
    for one in spans:
        place = (one.attributes["megatron.iteration"], one.attributes["dl.rank"])
        by_trace.setdefault(one.trace, set()).add(place)
    assert sorted(map(sorted, by_trace.values())) == [[(3, 0), (3, 1)], [(4, 0), (4, 1)]]
    for trace in by_trace:
        ids = {one.id for one in spans if one.trace == trace}
        assert all(one.parent in ids for one in spans if one.trace == trace and one.parent)
        (root,) = (one for one in spans if one.trace == trace and not one.parent)
        assert (root.name, root.attributes["dl.rank"]) == ("megatron.train_step", 0)


def test_the_last_steps_are_those_of_the_last_attempt(tmp_path: Path) -> None:
    """The first attempt's later steps were abandoned."""
    for attempt, newest in ((0, 1000), (1, 540)):
        columns = rows("steps", 2, attempt=attempt, step=[newest - 1, newest])
        write_rows(Location(str(tmp_path / "events")), TableFile("steps", "n", attempt, 1, 2), columns)
    with open_store(tmp_path) as store:
        assert otlp.choose(store, "per_step", None, None).last == 540


def test_resources_are_those_of_the_attempt(run: Path) -> None:
    pids = {(one.resource["megascale.attempt"], one.resource["process.pid"]) for one in send(run, "--ranks", "1")}
    assert pids == {(0, 1), (1, 101)}


def test_a_second_export_sends_equal_identifiers(run: Path) -> None:
    first, second = send(run, "--spans", "all"), send(run / "events", "--spans", "all")
    assert [(one.trace, one.id, one.parent) for one in first] == [(one.trace, one.id, one.parent) for one in second]
    assert len({one.id for one in first}) == len(first)
    fewer = {one.id for one in send(run, "--spans", "default")}
    assert fewer and fewer < {one.id for one in first}


def test_defaults_are_the_first_rank_and_the_last_steps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "OTLP_STEPS", 2)
    spans = send(run)
    assert {(one.attributes["dl.rank"], one.attributes["megatron.iteration"]) for one in spans} == {(0, 3), (0, 4)}
    assert "megatron.microbatch.forward" not in {one.name for one in spans}


def test_many_spans_come_in_several_requests(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "BATCH", 7)
    with receiver() as found:
        assert main(["events", str(run), "--otlp", found.url, "--spans", "all", "--steps", "4"]) == 0
    assert len(found.spans) == len(EVENTS) + 1  # the step and its two phases; two actions are in the optimizer's
    assert len(found.requests) == -(-len(found.spans) // 7)


def test_opentelemetrys_variables_are_heeded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with receiver() as found:
        assert main(["events", str(run), "--otlp", f"{found.url}/of/my/site"]) == 0
    assert found.spans
    path, headers = found.requests[0]
    assert (path, headers["authorization"], headers["content-encoding"]) == ("/of/my/site", "Bearer x", "gzip")


def test_a_receiver_that_is_busy_gets_them_later(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with receiver([503]) as found:
        assert main(["events", str(run), "--otlp", found.url, "--steps", "4"]) == 0
    assert len(found.requests) == 2 and found.spans
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_receiver_that_refuses_is_one_message(run: Path, capsys: pytest.CaptureFixture[str], status: int) -> None:
    with receiver([status]) as found:
        err = refusal(capsys, run, "--otlp", found.url)
    assert f"{found.url}/v1/traces does not take spans: " in err and str(status) in err


def test_a_refusal_after_some_spans_is_an_error_too(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "BATCH", 10)
    with receiver([200, 413]) as found:
        assert "413" in refusal(capsys, run, "--otlp", found.url)
    assert len(found.spans) == 10


def test_an_absent_receiver_is_one_message(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    err = refusal(capsys, run, "--otlp", f"http://127.0.0.1:{port}")
    assert f"nothing answers at 127.0.0.1:{port}: Connection refused" in err


@pytest.mark.parametrize(
    "url", ["localhost:4318", "", "ftp://localhost", "http://", "http://:4318", "http://a:99999", "http://a:b", "http://[::"]
)  # fmt: skip
def test_a_bad_url_is_one_message(run: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert f"{url!r} is no URL of an OTLP/HTTP receiver" in refusal(capsys, run, "--otlp", url)


def test_without_opentelemetry_the_message_says_what_to_install(run: Path) -> None:
    imports = "import sys; sys.modules['opentelemetry'] = None; from megascale.cli.main import main"
    code = f"{imports}; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "events", str(run), "--otlp", "http://127.0.0.1:1"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert "OpenTelemetry is not installed" in done.stderr and "pip install 'megascale[otel]'" in done.stderr


def test_choices_that_nothing_matches_are_said(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with receiver() as found:
        url = found.url
        assert "no steps of these ranks  -> it has ranks 0, 1" in refusal(capsys, run, "--otlp", url, "--ranks", "7")
        assert "steps 50 to 60 have no spans" in refusal(capsys, run, "--otlp", url, "--steps", "50:60")
        write_rows(Location(str(tmp_path / "events")), TableFile("ranks", "n", 0, 1, 2), rows("ranks"))
        assert "the store has no steps" in refusal(capsys, tmp_path, "--otlp", url)
    assert found.requests == []


def test_a_query_and_an_export_are_not_mixed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "in the place of a query" in refusal(capsys, run, "steps", "--otlp", "http://127.0.0.1:1")
    assert "what --otlp sends" in refusal(capsys, run, "lost-events", "--ranks", "0")
