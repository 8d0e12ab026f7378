"""The report of a run: one HTML file without script, font, picture or link beside it, to send to a colleague."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape

import numpy as np

import megascale
from megascale.core.rank import format_ranks
from megascale.core.units import format_bytes, format_count, format_duration, format_time
from megascale.operate.diagnose.slow.expert_loads import LOAD_HEAD, MOST_LOAD, ExpertLoads
from megascale.operate.show.charts.report_charts import Bar, CellLevel, Mark, Series, bar_chart, grid_chart, line_chart
from megascale.operate.show.charts.shapes import BLUE, GREEN, ORANGE, RED, REPORT_START, STYLE
from megascale.operate.show.curves import CURVES
from megascale.operate.show.rank_grid import rank_matrix
from megascale.operate.show.run_view import RunView
from megascale.operate.show.store_view import StoreView

MOST_POINTS = 800  # most points of a curve
MOST_ROWS = 200  # most incidents and findings that are listed: the last, and the costliest

PAGE_STYLE = """
body { font: 14px sans-serif; color: #222; max-width: 1100px; margin: 24px auto; padding: 0 16px }
h1 { font-size: 22px } h2 { font-size: 17px; margin-top: 28px; border-bottom: 1px solid #ddd; padding-bottom: 4px }
table { border-collapse: collapse } td, th { text-align: left; padding: 3px 12px 3px 0; vertical-align: top }
th { color: #666; font-weight: normal } .verdict { padding: 8px 12px; background: #f3f3f3; border-left: 4px solid #888 }
.bad { border-color: #b2182b } .charts { display: flex; flex-wrap: wrap; gap: 8px } svg { max-width: 100% }
.note { color: #666 }
"""

SLOWNESS_LEVELS = (
    CellLevel(-math.inf, "#e6f2ea", "as its peers"), CellLevel(0.03, "#fdae6b", "3% slower"),
    CellLevel(0.10, "#e6550d", "10%"), CellLevel(0.30, "#a63603", "30%"),
)  # fmt: skip

LOAD_LEVELS = (
    CellLevel(-math.inf, "#e6f2ea", "below 1.25 times the mean"), CellLevel(1.25, "#fdae6b", "1.25 times"),
    CellLevel(MOST_LOAD, "#e6550d", f"{MOST_LOAD:g}"), CellLevel(2 * MOST_LOAD, "#a63603", f"{2 * MOST_LOAD:g}"),
)  # fmt: skip

MEMORY_COLOURS = ("#eff3ff", "#bdd7e7", "#6baed6", "#3182bd", "#08519c")


def render_report(view: RunView, store: StoreView | None, timeline: str, notes: Sequence[str] = ()) -> str:
    """Return the report. `store`: None without an event store; `timeline`: a picture as SVG, "" for none; `notes`: what
    is missing, and why.
    """
    sections = [
        *_header(view, store.verdicts if store is not None else None),
        *([_findings(store)] if store is not None else ()),
        _curves(view),
        *(_heat_map(view, store) if store is not None else ()),
        *(_waterfall(store) if store is not None else ()),
        *(["<h2>Timeline</h2>", timeline] if timeline else ()),
        *(_memory(view, store.memory) if store is not None else ()),
        *(_experts(store.experts) if store is not None and len(store.experts.steps) else ()),
        _incidents(view),
        *(f"<p class='note'>{escape(note)}</p>" for note in notes),
    ]
    made = f"made by megascale {megascale.__version__} at {format_time(time.time())}"
    style = f"<style>{PAGE_STYLE}{STYLE}</style>"
    head = f"<html lang='en'><head><meta charset='utf-8'><title>{escape(view.name)}</title>{style}</head>"
    foot = f"<p class='note'>{escape(made)}</p></body></html>"
    return "\n".join([f"{REPORT_START.decode()}dashboard -->", head, "<body>", *sections, foot]) + "\n"


def _header(view: RunView, findings: Sequence[str] | None) -> Iterator[str]:
    last = view.curves.last
    speed, mfu = last.get("tokens_per_s", math.nan), last.get("mfu_full", math.nan)
    yield f"<h1>{escape(view.name)}</h1>"
    ill = " bad" if view.is_ill(findings) else ""
    yield f"<p class='verdict{ill}'>{escape(view.verdict(findings))}</p>"
    yield _table([
        ("state", f"{view.state}, attempt {view.attempt}"),
        ("model", view.model),
        ("layout", view.layout),
        ("step", view.progress),
        ("loss", CURVES["loss"].value(last["loss"]) if last else ""),
        ("throughput", f"{format_count(speed)} tokens/s" if math.isfinite(speed) else ""),
        ("MFU", f"{mfu:.1%}, full-attention convention" if math.isfinite(mfu) else "the peak is not known"),
        ("folder", str(view.folder.resolve())),
    ])  # fmt: skip


def _findings(store: StoreView) -> str:
    if not store.findings:
        return "<h2>Findings</h2><p>The analyses found nothing that slows this run down.</p>"
    items = (
        f"<li>{escape(str(finding))}<ul>{''.join(f'<li>{escape(line)}</li>' for line in finding.evidence)}</ul></li>"
        for finding in store.findings[:MOST_ROWS]
    )
    return f"<h2>Findings</h2><ol>{''.join(items)}</ol>"


def _curves(view: RunView) -> str:
    marks = [Mark(each.step, str(each.id), f"incident {each.id}: {each.what}") for each in view.incidents]
    drawn = {metric: [Series(metric, *view.curves.drawn(metric, MOST_POINTS))] for metric in CURVES}
    if view.curves.valid:
        steps, losses = zip(*view.curves.valid, strict=True)
        drawn["loss"].append(Series("validation", np.array(steps), np.array(losses), ORANGE))
    charts = (line_chart(kind.title, drawn[metric], marks, kind.tick) for metric, kind in CURVES.items())
    return f"<h2>Curves</h2><div class='charts'>{''.join(charts)}</div>"


def _heat_map(view: RunView, store: StoreView) -> Iterator[str]:
    matrix, heat = rank_matrix(view.topology), store.heat
    excess = matrix.of(store.slowness)

    names = matrix.names(store.nodes)

    def note(row: int, column: int) -> str:
        known = np.isfinite(excess[row, column])
        beside = f"{excess[row, column]:+.1%} beside its peers" if known else "not compared"
        return f"{names[row, column]}: {beside}"

    title = f"compute time of each rank beside its peers, steps {heat.first_step} to {heat.last_step}"
    yield "<h2>Heat map</h2>"
    yield grid_chart(title, excess, SLOWNESS_LEVELS, matrix.labels, note)
    if heat.outliers:
        rows = [
            (
                str(each.culprit), each.kind, format_ranks(each.culprit.ranks), f"{each.ratio - 1:+.1%}",
                f"{1e3 * each.cost_s:.3g} ms a step ({each.cost_share:.1%})",
            )
            for each in heat.outliers
        ]  # fmt: skip
        yield _table(rows, ("outlier", "kind", "ranks", "beside peers", "costs the job"))
    if store.hosts is not None:
        yield "<h2>Hosts by their metrics</h2>"
        yield f"<pre>{escape(str(store.hosts))}</pre>"


def _waterfall(store: StoreView) -> Iterator[str]:
    bars, left, breakdown = [], 0.0, store.breakdown
    if breakdown is None:
        return
    for level in breakdown.waterfall:
        whole = level.name in ("peak", "achieved")
        colour = GREEN if whole else BLUE if level.name == "compute below the peak" else ORANGE
        bars.append(Bar(level.name, 0.0 if whole else left, level.left, f"{100 * level.points:.1f}", colour))
        left = level.left
    yield "<h2>Where the time went</h2>"
    yield bar_chart(f"MFU points, steps {breakdown.first_step} to {breakdown.last_step}", bars)
    yield f"<pre>{escape(breakdown.to_text())}</pre>"


def _memory(view: RunView, memory: np.ndarray) -> Iterator[str]:
    known = memory[np.isfinite(memory)]
    if not len(known) or not known.max():
        return
    matrix, low, high = rank_matrix(view.topology), float(known.min()), float(known.max())
    values = matrix.of(memory)
    steps = [low + (high - low) * number / len(MEMORY_COLOURS) for number in range(len(MEMORY_COLOURS))]
    levels = [
        CellLevel(least, colour, format_bytes(least)) for least, colour in zip(steps, MEMORY_COLOURS, strict=True)
    ]
    levels = levels if high > low else [levels[-1]._replace(least=-math.inf), CellLevel(math.inf, RED, "")]

    def note(row: int, column: int) -> str:
        return f"rank {matrix.ranks[row, column]}: {format_bytes(values[row, column])}"

    title = f"peak memory of each rank, {format_bytes(high)} at most"
    yield "<h2>Memory</h2>"
    yield grid_chart(title, values, levels, matrix.labels, note)


def _experts(found: ExpertLoads) -> Iterator[str]:
    loads, labels = np.nanmean(found.loads, 0), [f"layer {layer}" for layer in found.layers]
    title = f"loads of experts, steps {found.steps[0]} to {found.steps[-1]}"
    yield "<h2>Experts</h2>"
    yield grid_chart(title, loads, LOAD_LEVELS, labels, lambda row, column: (
        f"{labels[row]}, expert {column}: {loads[row, column]:.2f} times the mean"))  # fmt: skip
    yield _table(found.rows, LOAD_HEAD)


def _incidents(view: RunView) -> str:
    if not view.incidents:
        return "<h2>Incidents</h2><p>None is recorded.</p>"
    rows = [
        (
            str(each.id), format_time(each.since), str(each.step), each.class_, each.what, each.action.reason,
            format_duration(each.recovery_s) if each.recovery_s is not None else "-",
            "" if each.steps_lost is None else str(each.steps_lost),
        )
        for each in view.incidents[-MOST_ROWS:]
    ]  # fmt: skip
    head = ("", "time", "step", "class", "what happened", "what was done", "recovered in", "steps lost")
    return f"<h2>Incidents</h2>{_table(rows, head)}"


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table. Without a `head` the first column names the rows."""
    names = "td" if head else "th"
    top = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(
        f"<tr><{names}>{escape(first)}</{names}>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f"<table>{top}{body}</table>"
