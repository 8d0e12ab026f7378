"""Published measurements as configurations: a row of rows.csv is a job with its step time in seconds."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.plan.account.flops import token_flops

ROWS = Path(__file__).with_name("rows.csv")
ABLATION = "megascale-table3-"
TABLES = {"vtrain-multi": "vtrain", "vtrain-single": "vtrain"}
"""Sources that are tables of one publication."""

MANY = 64
"""Fewest devices of a row that counts for the goal."""

GOALS = {"A100": "a100", "H100": "h100"}
"""Accelerators with a goal for the error, and the prefix of their profiles' names."""

NODE = 8
"""Devices of a node that shard, of a row with HSDP."""

FLAGS = {"0": False, "1": True, "": False}

SPLIT = {"zb-1p": "zb_h1", "zb-v": "zb_v"}
"""Published schedules with split backwards that ours come closest to; no fit uses their rows."""


@dataclass(frozen=True)
class Row:
    """A measurement. `line`: line number in the file; `trusted`: False for a doubtful measurement."""

    line: int
    source: str
    table: str
    hardware: str
    stack: str
    config: RunConfig
    step_s: float
    trusted: bool
    text: dict[str, str]

    @property
    def step(self) -> int | None:
        """Row of MegaScale's ablation, or None."""
        return int(self.stack.removeprefix(ABLATION)) if self.stack.startswith(ABLATION) else None

    @property
    def publication(self) -> str:
        """Publication of the source; a fit leaves out whole publications."""
        return TABLES.get(self.source, self.source)

    @property
    def recipe(self) -> str:
        """The recipe of GEMMs; "" for bf16."""
        return self.config.fp8.recipe if self.config.train.quantizes else ""

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stack profiles."""
        return (self.stack,) if self.step is None else ("megatron-2023", "megascale-2024")

    @property
    def own(self) -> dict[str, Any]:
        """Overrides of the stack by the row."""
        wide = {"gradient_bytes": 4} if "reduced in fp32" in self.text["note"] else {}
        return {"attention": self.text["attention"], **wide}

    @property
    def flops(self) -> float:
        """FLOPs per token by the convention of the source's MFU."""
        return float(self.text["flops"]) if self.text["flops"] else token_flops(self.config.model).full

    @property
    def parallelism(self) -> str:
        """Axes of parallelism in use, such as 'tp pp dp'."""
        p = self.config.parallel
        axes = [("tp", p.tp > 1), ("pp", p.pp > 1), ("fsdp" if p.zero == 3 else "dp", self.config.dp > 1)]
        return " ".join(name for name, used in axes if used) or "one device"


def read(path: Path = ROWS) -> Iterator[Row]:
    """Read the rows with a schedule of megascale's, and 8 bits or more.

    Raises: ValueError for an invalid row: indivisible batch, or a layout with another number of devices.
    """
    return (row for row in _read(path, {name: name for name in SCHEDULES.cards}) if row.recipe != "nvfp4")


def read_block_scaled(path: Path = ROWS) -> Iterator[Row]:
    """Read the rows in MXFP8 and in NVFP4; no fit uses those in NVFP4."""
    return (row for row in _read(path, {name: name for name in SCHEDULES.cards}) if row.recipe in ("mxfp8", "nvfp4"))


def read_split(path: Path = ROWS) -> Iterator[Row]:
    """Read the rows of published schedules with split backwards, with those of ours (`SPLIT`)."""
    return _read(path, {name: ours for name, ours in SPLIT.items() if ours in SCHEDULES.cards})


def _read(path: Path, schedules: Mapping[str, str]) -> Iterator[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        for line, text in enumerate(csv.DictReader(file), start=2):
            if (schedule := schedules.get(text["schedule"])) is not None:
                yield _row(line, text, schedule)


def goals(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Pick the rows that count for the goal, by accelerator; accelerators without such rows are left out."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for name, start in GOALS.items():
            if row.config.world_size >= MANY and row.hardware.startswith(start):
                groups.setdefault(name, []).append(row)
    return dict(sorted(groups.items()))


def _row(line: int, text: dict[str, str], schedule: str) -> Row:
    try:
        config = RunConfig.model_validate(_tree(text, schedule)).resolve(int(text["gpus"]))
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from error
    if config.world_size != int(text["gpus"]) or config.batch.total % (config.batch.micro * config.dp):
        raise ValueError(
            f"line {line}: {text['gpus']} devices, a batch of {text['batch']}: not {text['tp']} x {text['pp']}"
        )
    return Row(
        line, text["source"], text["table"], text["hardware"], text["stack"], config, float(text["step_s"]),
        "doubtful" not in text["note"], text,
    )  # fmt: skip


def _tree(text: dict[str, str], schedule: str) -> dict[str, Any]:
    """Convert a row to a configuration, with a schedule of megascale's."""

    def number(name: str) -> int:
        return int(text[name])

    gated = FLAGS[text["gated"]]
    return {
        "name": "row",
        "model": {
            "num_layers": number("layers"),
            "hidden_size": number("hidden"),
            "num_heads": number("heads"),
            "num_kv_heads": number("kv_heads"),
            "ffn_size": number("ffn"),
            "vocab_size": number("vocab"),
            "seq_length": number("seq"),
            "block": text["block"],
            "window": number("window"),
            "activation": "swiglu" if gated else "gelu",
            "norm": "rmsnorm" if gated else "layernorm",
            "tie_embeddings": not gated,
        },
        "parallel": {
            "tp": number("tp"),
            "sp": FLAGS[text["sp"]],
            "pp": number("pp"),
            "vpp": number("vpp"),
            "dp": number("dp"),
            "zero": number("zero"),
            "dp_shard": NODE // number("tp") if "HSDP" in text["note"] else None,
            "schedule": schedule,
        },
        "batch": {"micro": number("micro"), "global": number("batch")},
        "train": {
            "steps": 1,
            "precision": "fp8" if text["precision"] in ("fp8", "nvfp4") else "bf16",
            "recompute": text["recompute"],
        },
        "fp8": _fp8(text["note"]),
        "optimizer": {"lr": 1e-4},
        "data": {"mock": True},
    }


def _fp8(note: str) -> dict[str, Any]:
    """Return the FP8 recipe in a note, by default delayed. Megatron-Bridge's NVFP4 recipe has no layers in bf16."""
    if "NVFP4" in note:
        return {"recipe": "nvfp4", "first_layers_bf16": 0, "last_layers_bf16": 0}
    recipes = {"row-wise": "rowwise", "MXFP8": "mxfp8", "per-tensor": "tensorwise", "float8": "tensorwise"}
    return {"recipe": next((recipe for words, recipe in recipes.items() if words in note), "delayed")}
