"""The exporter of a process: its text, its targets' file, and that it never ends a job."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from megascale.core.network import listen
from megascale.operate.store import metrics_server
from megascale.operate.store.exporter import MetricsEndpoint, exporting
from megascale.operate.store.families import MetricFamily, exposition


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def endpoint(folder: Path, port: int, host: str = "127.0.0.1") -> MetricsEndpoint:
    return MetricsEndpoint(host, port, "run", folder, "node/1", "host-1")


def free_port() -> int:
    with listen("127.0.0.1") as one:
        return int(one.getsockname()[1])


def test_metrics_are_served_and_found_by_a_file(tmp_path: Path) -> None:
    said: list[str] = []
    place = endpoint(tmp_path, free_port())
    with exporting(lambda: [MetricFamily("x", "gauge", "help", [(place.labels, 3.0)])], place, said.append) as address:
        until(lambda: bool(said))
        (target,) = json.loads((tmp_path / "prometheus" / "node_1.json").read_text())
        assert target == {"targets": [address], "labels": {"run": "run"}}
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            (family,) = text_string_to_metric_families(answer.read().decode())
        assert family.samples[0].labels == {"run": "run", "node": "node/1"}
        assert said == [f"metrics at http://{address}/metrics"]
    assert not list((tmp_path / "prometheus").iterdir())


def test_without_a_port_nothing_listens(tmp_path: Path) -> None:
    with exporting(list, endpoint(tmp_path, 0), print) as address:
        assert address is None
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_a_line_and_not_an_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "PORTS", 1)
    said: list[str] = []
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with exporting(list, endpoint(tmp_path, port), said.append) as address:
            assert address is None
    assert said == [f"WARNING: no metrics at 127.0.0.1:{port}: ports {port} to {port} are in use"]


def test_an_address_of_another_host_is_a_line(tmp_path: Path) -> None:
    said: list[str] = []
    with exporting(list, endpoint(tmp_path, free_port(), "192.0.2.1"), said.append) as address:
        assert address is None
    assert said[0].startswith("WARNING: no metrics at 192.0.2.1:")


def test_a_folder_that_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "prometheus").write_text("a file in the way")
    with exporting(list, endpoint(tmp_path, free_port()), said.append) as address:
        until(lambda: bool(said))
        assert said[0].startswith(f"WARNING: metrics at http://{address}/metrics, but not in ")
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            assert answer.read() == b""


def test_a_listener_on_all_interfaces_is_named_by_its_host(tmp_path: Path) -> None:
    assert endpoint(tmp_path, 9400, "0.0.0.0").address(9401) == "host-1:9401"
    assert endpoint(tmp_path, 9400, "::1").address(9401) == "[::1]:9401"


def test_counters_end_with_total_and_values_keep_their_digits() -> None:
    families = [
        MetricFamily("a_bytes", "counter", "bytes of a", [({"rank": "1"}, 2.0**40)]),
        MetricFamily("b_ratio", "gauge", 'a "share"', [({"name": 'with "quotes"'}, float("nan"))]),
    ]
    text = exposition(families).decode()
    assert "# TYPE megascale_a_bytes_total counter" in text
    parsed = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    assert parsed["megascale_b_ratio"].labels == {"name": 'with "quotes"'}
    assert (parsed["megascale_a_bytes_total"].labels, parsed["megascale_a_bytes_total"].value) == (
        {"rank": "1"},
        2.0**40,
    )
