"""Tables of the one-GPU comparison: medians over rounds, utilisation, and goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_systems import Record
from peer_systems import OURS
from peer_table import pipes

from megascale.catalog.accelerators import Peak, stated_peak
from megascale.core.units import GIB, format_flops
from megascale.plan.account.flops import mfu

REGION = "gpu"
"""Markers of the tables on a page."""

Key = tuple[str, str, int | None, str]
"""Device, case, layers and precision of a comparison."""


@dataclass(frozen=True)
class Row:
    """Result of a system in a case: medians over `rounds`, with the lowest and the highest quartile of a step. MFU by
    the `full` and `causal` conventions; `attained`: utilisation (full) of the model's GEMM rate; `ratio`: megascale's
    tokens/s divided by this system's.
    """

    system: str
    rounds: int
    step_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    memory: float
    full: float | None
    causal: float | None
    attained: float | None
    ratio: float | None
    how: str


@dataclass(frozen=True)
class Failed:
    """A system that failed in a case, and the reason."""

    system: str
    why: str


Table = dict[Key, list[Row | Failed]]


def tables(records: Iterable[Record]) -> Table:
    """Group runs to rows by case, in the order of the first runs."""
    grouped: dict[Key, dict[str, list[Record]]] = {}
    records = list(records)
    for record in records:
        grouped.setdefault(key_of(record, records), {}).setdefault(record["system"], []).append(record)
    return {key: rows(key, systems) for key, systems in grouped.items()}


def key_of(record: Record, records: Sequence[Record]) -> Key:
    """Return the key of a run. A failed run lacks device and layers, and takes both from other runs of the case."""
    alike = [record, *(r for r in records if r["case"] == record["case"] and r["small"] == record["small"])]
    device = next((r["device"] for r in alike if "device" in r), "")
    layers = next((r["layers"] for r in alike if r["layers"] is not None), None)
    return device, record["case"], layers, record["precision"]


def rows(key: Key, systems: dict[str, list[Record]]) -> list[Row | Failed]:
    """Build a row per system."""
    succeeded = {name: [run for run in runs if "failure" not in run] for name, runs in systems.items()}
    ours = [run["tokens_per_s"] for run in succeeded.get(OURS, [])]
    attainable = [run["attainable"]["flops"] for run in succeeded.get(OURS, []) if run["attainable"]]
    best = Peak(statistics.median(attainable), "measured") if attainable else None
    members: list[Row | Failed] = []
    for name, runs in succeeded.items():
        if runs:
            members.append(_row(key, name, runs, statistics.median(ours) if ours else None, best))
        else:
            members.append(Failed(name, systems[name][-1]["failure"]))
    return members


def _row(key: Key, system: str, runs: Sequence[Record], ours: float | None, best: Peak | None) -> Row:
    device, _, _, precision = key
    speed = statistics.median(run["tokens_per_s"] for run in runs)
    flops, peak = runs[0]["flops_per_token"], stated_peak(device, precision)
    steps = [run["step_s"] for run in runs]
    return Row(
        system=system,
        rounds=len(runs),
        step_s=statistics.median(step["median"] for step in steps),
        low_s=min(step["low"] for step in steps),
        high_s=max(step["high"] for step in steps),
        tokens_per_s=speed,
        memory=max(run["peak_memory_bytes"] for run in runs),
        full=mfu(flops["full"], speed, peak.flops) if peak else None,
        causal=mfu(flops["causal"], speed, peak.flops) if peak else None,
        attained=mfu(flops["full"], speed, best.flops) if best else None,
        ratio=ours / speed if ours and system != OURS else None,
        how=runs[-1].get("how", ""),
    )


HEADER = (
    "case", "precision", "system", "step ms", "quartiles", "tokens/s", "MFU full", "causal", "of attainable",
    "memory GiB", "tokens/s x",
)  # fmt: skip


def markdown(table: Table, records: Sequence[Record], gemm: Record | None) -> str:
    """Format throughput, time by kind of kernel, GEMM rates and setups, in Markdown."""
    lines = [caption(records), "", pipes(HEADER), pipes(("---", "---", "---", *["---:"] * (len(HEADER) - 3)))]
    for (_, case, layers, precision), members in table.items():
        for row in members:
            name = f"{case}, {layers} layers" if layers else case
            lines.append(pipes((name, precision, *cells(row))))
    lines += ["", *shares(records), *gemm_rates(gemm)]
    systems = {row.how: None for members in table.values() for row in members if isinstance(row, Row) and row.how}
    lines += [f"- {how}." for how in systems]
    lines += [f"- {line}" for line in goals(table)]
    return "\n".join(lines).rstrip()


def text(table: Table) -> str:
    """Format the rows as text for a terminal."""
    lines = []
    for (device, case, layers, precision), members in table.items():
        lines.append(f"{case}, {layers} layers, {precision}, on {device}")
        body = [HEADER[2:], *(cells(row) for row in members if isinstance(row, Row))]
        widths = [max(len(line[column]) for line in body) for column in range(len(body[0]))]
        for line in body:
            padded = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            lines.append("  " + "  ".join([line[0].ljust(widths[0]), *padded]).rstrip())
        lines += [f"  {row.system}: {row.why}" for row in members if isinstance(row, Failed)]
        lines.append("")
    return "\n".join([*lines, *goals(table)]).rstrip()


def cells(row: Row | Failed) -> tuple[str, ...]:
    """Format a row's cells, from the system onward."""
    if isinstance(row, Failed):
        return (row.system, f"n/a: {row.why}".replace("|", "\\|"), *[""] * (len(HEADER) - 4))
    return (
        row.system, f"{row.step_s * 1e3:,.1f}", f"{row.low_s * 1e3:,.1f}..{row.high_s * 1e3:,.1f}",
        f"{row.tokens_per_s:,.0f}", *map(_percent, (row.full, row.causal, row.attained)),
        f"{row.memory / GIB:.1f}", "" if row.ratio is None else f"{row.ratio:.3f}",
    )  # fmt: skip


def caption(records: Sequence[Record]) -> str:
    """Describe device, versions and method."""
    devices = ", ".join(dict.fromkeys(r["device"] for r in records if "device" in r))
    versions = ", ".join(dict.fromkeys(r["torch"] for r in records if "torch" in r))
    counts = {r["step_s"]["count"] for r in records if "step_s" in r}
    steps = "..".join(map(str, sorted({min(counts), max(counts)}))) if counts else "no"
    return (
        f"Measured on {devices}; torch {versions}. Medians of {steps} timed steps over alternating rounds; quartiles: "
        "the lowest and the highest of all rounds. MFU is relative to the vendor's peak in the precision, *of "
        "attainable* to the best rate of the model's own GEMMs (fp8: with or without fast accumulation). tokens/s x: "
        "megascale / the system."
    )


def shares(records: Sequence[Record]) -> list[str]:
    """Format the shares of megascale's step by kind of kernel: a line per case and precision, from the last round."""
    last = {key_of(record, records): record["kernels"] for record in records if record.get("kernels")}
    if not last:
        return []
    names = [name for name in next(iter(last.values())) if any(kernels[name] >= 5e-4 for kernels in last.values())]
    lines = [pipes(("megascale's step", "precision", *names)), pipes(("---", "---", *["---:"] * len(names)))]
    for (_, case, layers, precision), kernels in last.items():
        lines.append(pipes((f"{case}, {layers} layers", precision, *(f"{kernels[name]:.1%}" for name in names))))
    return [*lines, ""]


def gemm_rates(gemm: Record | None) -> list[str]:
    """Format GEMM rates, a line per shape."""
    if not gemm:
        return []
    formats = list(dict.fromkeys(rate["format"] for rate in gemm["rates"]))
    lines = [pipes(("GEMM m x k x n", *formats)), pipes(("---", *["---:"] * len(formats)))]
    shapes: dict[str, dict[str, str]] = {}
    for rate in gemm["rates"]:
        cell = format_flops(rate["rate"]["median"]) if rate["rate"] else "n/a"
        shapes.setdefault(rate["shape"], {})[rate["format"]] = cell
    return [*lines, *(pipes((shape, *(row.get(name, "") for name in formats))) for shape, row in shapes.items()), ""]


MFU_GOALS = {"llama3-8b-slice": 0.55, "gpt3-175b-slice": 0.60, "megascale-175b-slice": 0.60}
"""Goals for MFU in bf16 on an H100."""

FP8_GAINS = {"llama3-8b-slice": 1.2, "gpt3-175b-slice": 1.3}
"""Goals for tokens/s in fp8, tensorwise, divided by tokens/s in bf16."""


def goals(table: Table) -> list[str]:
    """List the goals and the verdicts, for devices with a known peak."""
    lines = []
    for (device, case, layers, precision), members in table.items():
        by_name = {row.system: row for row in members if isinstance(row, Row)}
        ours, titan = by_name.get(OURS), by_name.get("torchtitan")
        if ours is None or ours.full is None or ours.causal is None:
            continue
        if precision == "bf16" and (goal := MFU_GOALS.get(case)):
            verdict = "reached" if ours.causal >= goal else "reached in full" if ours.full >= goal else "missed"
            lines.append(f"{case} bf16: MFU {ours.full:.1%} full, {ours.causal:.1%} causal; {goal:.0%} {verdict}")
        if precision == "fp8":
            plain = [row for row in table.get((device, case, layers, "bf16"), []) if row.system == OURS]
            if plain and isinstance(plain[0], Row) and (goal := FP8_GAINS.get(case)):
                gain = ours.tokens_per_s / plain[0].tokens_per_s
                lines.append(f"{case} fp8: {gain:.2f} x bf16's tokens/s; {goal} {_verdict(gain >= goal)}")
        if titan is not None and titan.ratio is not None:
            lines.append(
                f"{case} {precision}: {titan.ratio:.3f} x torchtitan's tokens/s; 1 {_verdict(titan.ratio > 1)}"
            )
    return lines


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"
