"""Published steps of mixtures of experts (experts.csv), planned with one efficiency for each accelerator and precision,
which its first row gives: a third of the rows that count. The others are left out of the fit.
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any, get_args

from calibration.published import Overlapped, PublishedStep, System
from megascale.config.run import RunConfig
from megascale.plan.account.flops import token_flops
from megascale.plan.simulate import profiles

EXPERTS = Path(__file__).with_name("experts.csv")
MODELS = Path(__file__).with_name("models.toml")

RECIPES = {"mxfp8": "mxfp8", "fp8": "blockwise"}
COUNTED = range(1, 29)  # rows that count for the bound
BOUND = 0.15  # largest error of a row within the bound
SLOWEST, FASTEST = 4.0, 0.25  # bounds of the factor of compute time
BISECTIONS = 20
LAUNCH_S = 3.06e-3
"""Seconds to launch a layer's forward without CUDA graphs: a third of 28.19 s / (64 x 48), a layer of Qwen3-30B in a
micro-batch of 4,096 tokens on 8 B200 (Megatron-Bridge 25.11); larger micro-batches took not much longer.
"""
OVERLAP_GAIN = 1.28 / 1.13  # of MegaScale-MoE by overlap between and in operators: arXiv:2505.11432, ablation

Group = tuple[str, str]
"""Accelerator and precision."""


@dataclass(frozen=True)
class ExpertRow:
    """A measurement. `text`: by column; `config`: None for a model that [model] cannot describe (`absent`)."""

    text: dict[str, str]
    config: RunConfig | None
    absent: str = ""

    @property
    def number(self) -> int:
        return int(self.text["row"])

    @property
    def name(self) -> str:
        t = self.text
        return f"{t['model']}, {t['gpus']} {t['hardware']}, {t['precision']}" + (f", {t['note']}" * (t["set"] in "CD"))

    @property
    def group(self) -> Group:
        return self.text["hardware"], self.text["precision"]

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step: as printed, or from tokens/s of a device or from MFU (full attention, bf16 peak)."""
        value, gpus = float(self.text["value"]), int(self.text["gpus"])
        tokens = int(self.text["batch"]) * int(self.text["seq"]) / gpus
        if self.text["unit"] == "mfu":
            assert self.config is not None
            peak = profiles.hardware(self.text["hardware"]).device.peak_of("bf16")
            return tokens * token_flops(self.config.model).full / (peak * value / 100)
        return value if self.text["unit"] == "s" else tokens / value

    @property
    def system(self) -> System:
        t = self.text
        overlaps = next(name for name in get_args(Overlapped) if name == t["overlap"])
        return System(t["dispatch"] == "ranks", overlaps, int(t["etp"]), t["graphs"] == "full", t["layout"] == "given")

    def step(self, factor: float = 1.0, system: System | None = None) -> PublishedStep:
        """Return the planned step. `factor`: of all compute times; `system`: in place of the row's."""
        assert self.config is not None
        t, stack = self.text, profiles.stack(self.text["stack"])
        cost = stack.attained.model_copy(update={"slowdown": stack.attained.slowdown * factor})
        own: dict[str, Any] = {"attention": t["attention"], "attained": cost}
        own |= {"host_s": LAUNCH_S} if t["graphs"] == "none" else {}
        hardware = profiles.hardware(t["hardware"])
        return PublishedStep(self.config, hardware, stack.model_copy(update=own), system or self.system)


def read(path: Path = EXPERTS) -> list[ExpertRow]:
    """Read the rows. Raises: ValueError for an invalid row"""
    models = tomllib.loads(MODELS.read_text(encoding="utf-8"))
    with open(path, encoding="utf-8", newline="") as file:
        return [_row(text, models[text["model"]]) for text in csv.DictReader(file)]


def _row(text: dict[str, str], model: Mapping[str, Any]) -> ExpertRow:
    if absent := model.get("absent"):
        return ExpertRow(text, None, absent)
    number = {
        name: int(text[name]) for name in ("seq", "batch", "micro", "tp", "pp", "vpp", "ep", "cp", "zero", "gpus")
    }
    parallel: dict[str, Any] = {name: number[name] for name in ("tp", "pp", "vpp", "ep", "cp")}
    parallel |= {"sp": text["sp"] == "1", "zero": number["zero"]}
    parallel |= {"cp_mode": "ulysses"} if number["cp"] > 1 else {}
    tree: dict[str, Any] = {
        "name": "row",
        "model": dict(model) | {"seq_length": number["seq"]},
        "parallel": parallel,
        "batch": {"micro": number["micro"], "global": number["batch"]},
        "train": {
            "steps": 1, "precision": "fp8" if text["precision"] in RECIPES else "bf16", "recompute": text["recompute"],
        },
        "fp8": {"recipe": "tensorwise" if "tensor" in text["note"] else RECIPES.get(text["precision"], "blockwise")},
        "optimizer": {"lr": 1e-4},
        "data": {"mock": True},
    }  # fmt: skip
    try:
        return ExpertRow(text, RunConfig.model_validate(tree).resolve(number["gpus"]))
    except ValueError as error:
        raise ValueError(f"row {text['row']}, {text['note']}: {error}") from error


def fitted_rows(rows: Iterable[ExpertRow]) -> dict[Group, ExpertRow]:
    """Return the first row of each accelerator and precision, of those that count."""
    found: dict[Group, ExpertRow] = {}
    for row in rows:
        if row.number in COUNTED:
            found.setdefault(row.group, row)
    return found


def factors(rows: Sequence[ExpertRow]) -> dict[Group, float]:
    """Fit the factor of compute time of each accelerator and precision. Without a row that counts it is the median of
    those with the precision.
    """
    found = {group: factor_of(row) for group, row in fitted_rows(rows).items()}
    by_precision = {
        group: median(value for (_, precision), value in found.items() if precision == group[1])
        for group in {row.group for row in rows} - found.keys()
    }
    return dict(sorted((found | by_precision).items()))


def factor_of(row: ExpertRow) -> float:
    """Return the factor with which the plan is the measured step, by bisection of its logarithm."""
    low, high = FASTEST, SLOWEST
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if row.step(middle).step_s > row.step_s else (middle, high)
    return math.sqrt(low * high)


def report(rows: Sequence[ExpertRow]) -> Iterator[str]:
    """Yield the tables of the page: bounds, factors, and every row."""
    plans = [row for row in rows if row.config is not None]
    found = factors(plans)
    seconds = {id(row): row.step(found[row.group]).step_s for row in plans}

    def error(row: ExpertRow) -> float:
        return seconds[id(row)] / row.step_s - 1

    counted = [row for row in plans if row.number in COUNTED]
    fitted = {id(row) for row in fitted_rows(plans).values()}
    left_out = [row for row in counted if id(row) not in fitted]
    yield "| experts | rows | mean error | within 15% |"
    yield "|---|---:|---:|---:|"
    for name, group in (("rows 1 to 28", counted), ("of these left out of the fit", left_out)):
        near = sum(abs(error(row)) <= BOUND for row in group)
        yield f"| {name} | {len(group)} | {mean(abs(error(row)) for row in group):.1%} | {near / len(group):.0%} |"
    yield ""
    yield from gains([row for row in plans if row.text["set"] == "C"], seconds)
    yield ""
    yield from orders([row for row in plans if row.text["set"] == "D"], seconds)
    yield ""
    values = ", ".join(f"{' '.join(group)} {value:.2f}" for group, value in found.items())
    yield f"Factors of compute time beside dense models: {values}. Rows in bold gave them."
    yield ""
    yield "| row | step | measured, s | planned, s | error |"
    yield "|---:|---|---:|---:|---:|"
    for row in plans:
        number = f"**{row.number}**" if id(row) in fitted else str(row.number)
        yield f"| {number} | {row.name} | {row.step_s:.2f} | {seconds[id(row)]:.2f} | {error(row):+.0%} |"
    absent: dict[str, list[str]] = {}
    for row in rows:
        if row.absent:
            absent.setdefault(f"{row.text['model']}: {row.absent}", []).append(row.text["row"])
    yield ""
    if absent:
        yield "Not planned, as `[model]` cannot describe them yet:"
        yield ""
    yield from (f"- {name} (rows {', '.join(numbers)})" for name, numbers in absent.items())


def gains(rows: Sequence[ExpertRow], seconds: Mapping[int, float]) -> Iterator[str]:
    """Tabulate MegaScale-MoE's gains: over Megatron-LM, and by overlap (published: 1.28 / 1.13)."""
    pairs = [tuple(group) for _, group in groupby(rows, key=lambda row: row.number)]
    yield f"| MegaScale-MoE, GPUs | {' | '.join(new.text['gpus'] for _, new in pairs)} |"
    yield f"|---|{'---:|' * len(pairs)}"
    lines = {
        "over Megatron-LM, measured": [old.step_s / new.step_s for old, new in pairs],
        "over Megatron-LM, planned": [seconds[id(old)] / seconds[id(new)] for old, new in pairs],
        "by overlap, measured": [OVERLAP_GAIN] * len(pairs),
        "by overlap, planned": [
            new.step(1.0, replace(new.system, overlaps="none")).step_s / new.step(1.0).step_s for _, new in pairs
        ],
    }
    yield from (f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |" for name, values in lines.items())


def orders(rows: Sequence[ExpertRow], seconds: Mapping[int, float]) -> Iterator[str]:
    """Tabulate the systems of each row of 2504.14960, from the fastest to the slowest, as measured and as planned."""
    yield "| row | measured, fastest first | planned |"
    yield "|---:|---|---|"
    for number, group in groupby(rows, key=lambda row: row.number):
        own = list(group)
        measured = [row.text["note"] for row in sorted(own, key=lambda row: row.step_s)]
        planned = [row.text["note"] for row in sorted(own, key=lambda row: seconds[id(row)])]
        yield f"| {number} | {' < '.join(measured)} | {'the same' if planned == measured else ' < '.join(planned)} |"
