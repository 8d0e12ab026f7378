"""The dashboard of real runs in Chromium: pages open, a rank is picked, and numbers are those of the store."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import numpy as np
import pytest

from megascale.operate.show.rank_grid import rank_matrix
from megascale.operate.show.run_reader import RunReader
from megascale.operate.show.store_view import read_store_view
from megascale.operate.store.query import fetch, open_store
from tests.jobs import Job, finish, job_config
from tests.operate.show.stores import store_loads
from tests.operate.show.web.chromium import Browser, dashboard, needs_chromium
from tests.runs import GPT

pytestmark = [pytest.mark.slow, needs_chromium]

LAYOUT = {"parallel__tp": 2, "parallel__pp": 2, "train__precision": "fp32", "observe__event_store": True}
TITLES = ("Overview", "Heat map", "Ranks", "Timeline", "MFU", "Memory", "Experts", "Casts", "Incidents")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four ranks."""
    folder = tmp_path_factory.mktemp("finished")
    finish(job_config(folder, GPT, **LAYOUT, train__steps=30))
    store_loads(folder / "runs" / "test", np.random.default_rng(0).uniform(0.0, 3.0, (4, 2, 8)))
    return folder / "runs" / "test"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(run: Path, browser: Browser) -> Iterator[Browser]:
    """A browser at the dashboard of the finished run."""
    with dashboard(run) as url:
        browser.open(url)
        browser.wait_for(lambda: browser.text("#values"), "the overview")
        yield browser


def test_all_pages_open_without_an_error_and_load_nothing_from_elsewhere(page: Browser) -> None:
    contents = {
        "Overview": "#curve-loss .main-svg", "Heat map": "#heat-map .main-svg", "Ranks": "#place .main-svg",
        "Timeline": "#timeline .barlayer .trace", "MFU": "#waterfall .main-svg", "Memory": "#stage-table",
        "Experts": "#expert-table", "Casts": "#cast-operands p", "Incidents": "#incident-list p",
    }  # fmt: skip
    for title in TITLES:
        page.open_tab(title)
        page.wait_for(functools.partial(page.has, contents[title]), title)
    assert page.errors() == []
    assert page.hosts() == {urlsplit(page.driver.current_url).netloc}
    assert "token" not in page.driver.current_url


def test_the_overview_has_the_metrics_of_the_run(page: Browser, run: Path) -> None:
    page.open_tab("Overview")
    curves = RunReader(run).read().curves
    trace = page.wait_for(lambda: page.traces("curve-loss"), "the loss")[0]
    assert trace["x"] == curves.steps.tolist()
    assert trace["y"] == pytest.approx(curves.values["loss"].tolist())
    assert f"{curves.last['loss']:.4f}" in page.text("#values")
    assert "done" in page.text("#header")


def test_heat_map_memory_and_mfu_are_those_of_the_store(page: Browser, run: Path) -> None:
    view, store = RunReader(run).read(), read_store_view(run)
    assert store is not None
    page.open_tab("Heat map")
    heat = page.wait_for(lambda: page.traces("heat-map"), "the heat map")[0]
    shown = page.run(
        "return [...document.querySelector('#heat-map .js-plotly-plot').calcdata[0][0].z].map(r => [...r])"
    )
    expected = rank_matrix(view.topology).of(store.slowness)
    assert heat["type"] == "heatmap"
    assert np.allclose(np.array(shown, dtype=float), expected)
    page.open_tab("Memory")
    table = page.wait_for(lambda: page.text("#stage-table"), "the memory")
    peaks = fetch(open_store(run), "SELECT max(peak_memory_bytes) / 1048576.0 AS mib FROM steps WHERE rank >= 2")
    assert f"{peaks['mib'][0]:.2f} MiB" in table.splitlines()[-1]
    page.open_tab("Experts")
    heat = page.wait_for(lambda: page.traces("expert-map"), "the experts")[0]
    assert heat["type"] == "heatmap"
    assert len(page.text("#expert-table").splitlines()) == 3
    page.open_tab("MFU")
    assert store.breakdown is not None
    assert page.wait_for(lambda: page.text("#breakdown"), "the breakdown").strip() == store.breakdown.to_text().strip()


def test_a_rank_is_picked_by_its_number_by_its_cell_and_on_the_heat_map(page: Browser, run: Path) -> None:
    page.open_tab("Ranks")
    page.wait_for(lambda: page.traces("place"), "the place")
    number = page.driver.find_element("css selector", "#rank")
    page.run("arguments[0].select()", number)
    number.send_keys("3\n")
    page.wait_for(lambda: "ranks 2, 3" in page.text("#rank-details"), "the tp group of rank 3")
    details = page.text("#rank-details")
    [(pid,)] = open_store(run).execute("SELECT pid FROM ranks WHERE rank = 3").fetchall()
    for words in ("pp\t1 of 2", "activations from\trank 1", f"process\t{pid}, attempt 0", "all_reduce"):
        assert words in details
    click(page, "place", 0, "t => t.customdata.indexOf(1)")
    page.wait_for(lambda: "ranks 0, 1" in page.text("#rank-details"), "the tp group of rank 1")
    page.open_tab("Heat map")
    page.wait_for(lambda: page.traces("heat-map"), "the heat map")
    cell = "const g = document.querySelector('#heat-map .js-plotly-plot'); const r = g.querySelector('.nsewdrag')"
    box = page.run(f"{cell}.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height * 5 / 8]")
    mouse(page, *box)
    page.wait_for(lambda: "ranks 2, 3" in page.text("#rank-details"), "the rank of the third row")
    assert "+" in page.text("#rank-details")
    assert page.errors() == []


def click(page: Browser, graph: str, trace: int, point: str) -> None:
    """Click on a point of a scatter trace."""
    script = f"""
        const g = document.querySelector('#{graph} .js-plotly-plot'), t = g.data[{trace}], i = ({point})(t);
        const l = g._fullLayout, box = g.getBoundingClientRect();
        return [box.x + l.xaxis._offset + l.xaxis.l2p(t.x[i]), box.y + l.yaxis._offset + l.yaxis.l2p(t.y[i])]"""
    mouse(page, *page.run(script))


def mouse(page: Browser, x: float, y: float) -> None:
    """Move the mouse to a point of the page, and click."""
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    actions = ActionBuilder(page.driver)
    actions.pointer_action.move_to_location(round(x) - 3, round(y))
    actions.pointer_action.move_to_location(round(x), round(y))
    actions.pointer_action.click()
    actions.perform()


def test_the_timeline_and_its_file_for_perfetto(page: Browser) -> None:
    page.open_tab("Timeline")
    traces = page.wait_for(lambda: page.traces("timeline"), "the timeline")
    names = {trace["name"] for trace in traces}
    assert {"forward", "backward", "wait", "tp", "pp", "messages"} <= names
    link = page.driver.find_element("css selector", "#download").get_attribute("href")
    cookies = "; ".join(f"{each['name']}={each['value']}" for each in page.driver.get_cookies())
    address = urljoin(page.driver.current_url, link)
    with urllib.request.urlopen(urllib.request.Request(address, headers={"Cookie": cookies})) as answer:
        items = json.load(answer)["traceEvents"]
    assert {item["pid"] for item in items} == {0, 2}, "the pipeline of rank 0"
    assert sum(item["ph"] == "s" for item in items) == sum(item["ph"] == "f" for item in items) > 0


def test_runs_side_by_side(run: Path, browser: Browser, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "other"
    other.parent.mkdir()
    os.symlink(run, other)
    with dashboard(run, other) as url:
        browser.open(url)
        browser.wait_for(lambda: browser.text("#values").count("done") == 2, "two runs")
        assert len(browser.traces("curve-loss")) == 2
        assert browser.errors() == []


def test_a_live_run_is_followed(browser: Browser, tmp_path: Path) -> None:
    """Its steps advance, a stopped rank is seen, and its end."""
    job = Job(job_config(tmp_path, GPT, **LAYOUT, train__steps=100_000))
    job.wait_for_step(3)
    stopped = job.ranks()[3]
    try:
        with dashboard(job.folder) as url:
            browser.open(url)
            browser.wait_for(lambda: "runs" in browser.text("#header"), "the state")
            first = browser.wait_for(lambda: len((browser.traces("curve-loss") or [{"x": []}])[0]["x"]), "a curve")
            browser.wait_for(lambda: len(browser.traces("curve-loss")[0]["x"]) > first, "more steps")
            os.kill(stopped, signal.SIGSTOP)
            browser.wait_for(lambda: "stands still" in browser.text("#header"), "the standstill")
            browser.wait_for(lambda: "rank 3 is stopped" in browser.text("#verdict"), "the verdict")
            os.kill(stopped, signal.SIGCONT)
            browser.wait_for(lambda: "runs" in browser.text("#header"), "progress")
            browser.open_tab("Ranks")
            browser.wait_for(lambda: browser.traces("place"), "the place")
            browser.driver.find_element("css selector", "#read-stack").click()
            browser.wait_for(lambda: "MainThread" in browser.text("#rank-stack"), "the stack of rank 0")
            time.sleep(1)
            job.signal(signal.SIGTERM)
            browser.wait_for(lambda: "stopped" in browser.text("#header"), "the end")
            assert browser.errors() == []
    finally:
        if job.process.poll() is None:
            os.kill(stopped, signal.SIGCONT)
            job.signal(signal.SIGTERM)
        job.end()
