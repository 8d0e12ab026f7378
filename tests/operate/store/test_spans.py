"""Spans of a run from its event store: Megatron-core's names in its groups, and trees with one root a step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megascale.operate.store.query import open_store
from megascale.operate.store.spans import (
    FORWARD_BACKWARD,
    TRAIN_STEP,
    SpanSelection,
    TraceSpan,
    read_spans,
    span_id,
    trace_id,
)
from tests.operate.store.span_store import KILLED, MS, STEPS, start_ns, write_store

DEFAULT = {"megatron.evaluate", "megatron.save_checkpoint"}
PER_STEP = DEFAULT | {
    "megatron.train_step", "megatron.forward_backward", "megatron.optimizer_step", "megatron.data_loading",
    "megatron.train.gc_collect", "megatron.p2p.send_forward", "megatron.p2p.recv_backward", "megatron.grad_sync",
}  # fmt: skip
ALL = PER_STEP | {
    "megatron.microbatch.forward",
    "megatron.microbatch.recompute",
    "megatron.microbatch.backward",
    "megatron.tp.all_gather",
    "megatron.dp.all_gather",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("run"))


def spans_of(run: Path, groups: str = "all", ranks: tuple[int, ...] = (0, 1), first: int = 1, last: int = 9) -> list:
    return list(read_spans(open_store(run), SpanSelection(groups, ranks, first, last)))


def place(span: TraceSpan) -> tuple[int, int, int]:
    return span.attempt, span.rank, span.step


@pytest.mark.parametrize(("groups", "names"), [("default", DEFAULT), ("per_step", PER_STEP), ("all", ALL)])
def test_the_presets_have_megatrons_names(run: Path, groups: str, names: set[str]) -> None:
    assert {span.name for span in spans_of(run, groups)} == names


def test_every_span_has_its_times_and_attributes(run: Path) -> None:
    spans = {span.name: span for span in spans_of(run, ranks=(1,), first=2, last=2)}
    start = start_ns(0, 1, 2)
    step, forward = spans[TRAIN_STEP], spans["megatron.microbatch.forward"]
    assert (step.start_ns, step.end_ns) == (start, start + 90 * MS)
    assert step.attributes == {
        "megatron.iteration": 2, "megatron.loss": 2.5, "megatron.grad_norm": 1.5, "dl.rank": 1,
        "megascale.tokens": 4096, "megascale.tags": "evaluation,checkpoint",
    }  # fmt: skip
    assert (forward.start_ns, forward.end_ns, forward.attributes["megatron.microbatch_id"]) == (
        start + 10 * MS,
        start + 18 * MS,
        1,
    )
    assert (spans[FORWARD_BACKWARD].start_ns, spans[FORWARD_BACKWARD].end_ns) == (start + 2 * MS, start + 50 * MS)
    assert spans[FORWARD_BACKWARD].attributes["megatron.num_microbatches"] == 2
    assert (spans["megatron.optimizer_step"].start_ns, spans["megatron.optimizer_step"].end_ns) == (
        start + 56 * MS,
        start + 70 * MS,
    )
    assert spans["megatron.p2p.send_forward"].attributes["megascale.peer"] == 0
    assert spans["megatron.tp.all_gather"].attributes["megascale.tensor"] == "qkv"
    assert "megascale.peer" not in spans["megatron.tp.all_gather"].attributes


@pytest.mark.parametrize("groups", ["default", "per_step", "all"])
def test_every_parent_is_a_span_of_the_export(run: Path, groups: str) -> None:
    spans = spans_of(run, groups)
    known = {(span.attempt, span.step, span.rank, span.key) for span in spans}
    assert len(known) == len(spans)
    children = [span for span in spans if span.parent]
    assert all((span.attempt, span.step, span.parent_rank, span.parent) in known for span in children)
    assert bool(children) == (groups != "default")


def test_a_step_is_a_tree_of_all_ranks(run: Path) -> None:
    spans = [span for span in spans_of(run) if place(span) != KILLED]
    roots = [(span.attempt, span.step, span.rank) for span in spans if not span.parent]
    assert roots == [(attempt, step, 0) for attempt, steps in STEPS.items() for step in steps]
    parents = {span.name: span.parent for span in spans if span.rank == 1}
    assert parents["megatron.train_step"] == TRAIN_STEP
    assert parents["megatron.microbatch.backward"] == FORWARD_BACKWARD
    assert parents["megatron.microbatch.recompute"] == FORWARD_BACKWARD
    assert parents["megatron.grad_sync"] == TRAIN_STEP


def test_the_events_of_a_step_without_an_end_have_no_parent_that_is_absent(run: Path) -> None:
    """A killed rank leaves events of a step without its row."""
    spans = [span for span in spans_of(run) if place(span) == KILLED]
    assert spans and TRAIN_STEP not in {span.name for span in spans}
    assert {span.parent for span in spans} == {"", FORWARD_BACKWARD}


def test_a_root_is_the_first_rank_that_was_chosen(run: Path) -> None:
    spans = [span for span in spans_of(run, ranks=(1,)) if span.name == TRAIN_STEP]
    assert {span.parent for span in spans} == {""}


def test_steps_are_read_in_parts_without_gap_or_repetition(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = spans_of(run)
    monkeypatch.setattr("megascale.operate.store.spans.STEPS_AT_ONCE", 1)
    parts = spans_of(run)
    assert Counter(map(repr, parts)) == Counter(map(repr, whole))
    assert {span.step for span in spans_of(run, first=2, last=3)} == {2, 3}


def test_identifiers_are_of_run_attempt_step_and_rank(run: Path) -> None:
    spans = spans_of(run)
    traces = {(span.attempt, span.step): trace_id("run", span) for span in spans}
    assert len(set(traces.values())) == len(traces)
    ids = {span_id("run", span, span.key, span.rank) for span in spans}
    assert len(ids) == len(spans) and all(0 < one < 1 << 64 for one in ids)
    assert trace_id("another run", spans[0]) != trace_id("run", spans[0])
