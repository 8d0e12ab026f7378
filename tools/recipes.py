"""The table of docs/recipes.md: what `megascale plan` says of every run in configs/gpu, and what was measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megascale.config.loading import load_config
from megascale.core.units import format_bytes
from megascale.plan.search.plan import Plan
from megascale.plan.search.report import format_layout
from megascale.plan.simulate import profiles
from results import pipes

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Recipe:
    """A run of configs/gpu: the profile of configs/hardware that plans it, and the nearest measurement."""

    name: str
    hardware: str
    measured: str = "none"

    @property
    def path(self) -> Path:
        return ROOT / "configs" / "gpu" / f"{self.name}.toml"

    @property
    def gpus(self) -> int:
        """The number of GPUs that the file's first line names."""
        return int(re.findall(r"# ([\d,]+) GPUs", self.path.read_text(encoding="utf-8"))[0].replace(",", ""))

    def plan(self) -> Plan:
        hardware = profiles.hardware(self.hardware)
        config = load_config(str(self.path), world_size=self.gpus)
        return Plan(config, hardware, profiles.stack_on(hardware, "megascale"))


RECIPES = (
    Recipe("llama3-8b", "h100", "8 of 32 layers on one H200: 57.5% causal, 63.5% full ([results](performance.md))"),
    Recipe("llama3-70b", "h100"),
    Recipe("gpt3-175b", "h100"),
    Recipe("megascale-175b", "a100-80g-roce", "MegaScale itself, with its block and windows: 6.34 s, 55.2% (Table 2)"),
    Recipe("megascale-530b", "a100-80g-roce", "MegaScale itself: 54.3% (Figure 9)"),
    Recipe("mixtral-8x22b", "h100", "Megatron-Core with folded experts: 49.3% (arXiv 2504.14960)"),
    Recipe("qwen3-235b-a22b", "h100", "Megatron-Core with ep 32: 2,132 tokens/s (arXiv 2603.07685)"),
    Recipe("deepseek-v3", "h100", "Megatron-Core with tp 2 in FP8, one MTP layer: 1,412 tokens/s (arXiv 2603.07685)"),
)


def table() -> list[str]:
    """Tabulate all recipes."""
    run, plan = (
        ("`configs/gpu/`", "on", "layout", "batch"),
        ("step s", "tokens/s a GPU", "MFU full", "causal"),
    )
    return pipes([*run, *plan, "memory", "measured"], *map(row, RECIPES))


def row(recipe: Recipe) -> list[str]:
    """Return the row of a recipe."""
    plan = recipe.plan()
    estimate, gpus = plan.estimate, recipe.gpus
    return [
        f"`{recipe.name}.toml`",
        f"{gpus:,} x {recipe.hardware}",
        format_layout(plan),
        f"{plan.config.batch.total:,}",
        f"{estimate.step_s:.2f}",
        f"{estimate.tokens_per_s / gpus:,.0f}",
        f"{estimate.mfu_full:.1%}",
        f"{estimate.mfu_causal:.1%}",
        format_bytes(plan.memory.total),
        recipe.measured,
    ]
