"""Estimated milliseconds of a step by kind of kernel on one H200, in bf16 and every FP8 recipe, beside those measured
in bf16; what FP8 gains by them; and what kernels that are not built would save.

GEMMs, attention and the optimizer are the planner's; other kernels move their bytes (`operator-bytes`) at its
bandwidth. Writes the tables into the page of the measurement.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lab.commands.operator_bytes import BF16, CONFIG, WEIGHTS, count, recipe_config
from lab.host_turn import host_turn
from lab.kernel_savings import Saving, savings
from lab.launches import Launch
from megascale.config.run import RunConfig
from megascale.core.files import write_text
from megascale.layout.blocks import block_spec, linears
from megascale.layout.chunks import bucket_sizes
from megascale.layout.tensors import padded_vocab
from megascale.plan.simulate import profiles
from megascale.plan.simulate.step_time import StepParts
from megascale.train.kernels import ALL_PURPOSES, classify
from results import RESULTS, filled, own_command, pipes

PAGE = RESULTS / "gpu.md"
CASES = {
    CONFIG: {"tensorwise": 1.20, "rowwise": 1.15},
    "configs/bench/gpt3-175b-slice.toml": {"tensorwise": 1.30, "rowwise": 1.25},
}
"""Models, with the bars of FP8's tokens/s over those of bf16, by recipe."""

HARDWARE, ATTENTION = "h200", "flash3"
HOPPER = ("tensorwise", "delayed", "rowwise", "blockwise", "static")  # recipes of its tensor cores
PLANNED = ("gemm", "attention", "optimizer")
GENERATION = 2025  # of the libraries
MUCH = 0.01  # share of a step
LOSS_PASSES = 3  # over the logits, in bf16: the statistics read them, the gradient reads and writes them

ASSUMED = {"tensor": (1250, 1100), "row": (1200, 1050), "block": (1000, 900)}
"""TFLOP/s of FP8 GEMMs in forward and, with fp32 accumulation, in backward, by granularity: other figures than the
planner's. On Hopper, 8192^3 was seen at 1,170 by torch and at 1,610 by cuBLASLt.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no argument."""


def run(options: argparse.Namespace) -> int:
    """Write the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    steps = {path: {name: Step(recipe_config(path, name)) for name in (BF16, *HOPPER)} for path in CASES}
    for region, lines in (
        ("estimates", estimates(steps, measured(text))),
        ("gains", gains(steps, measured(text))),
        ("not built", [*not_built(steps), "", refuted(steps, host_turn(CONFIG))]),
    ):
        text = filled(text, region, "\n".join(lines), PAGE)
    write_text(PAGE, text)
    return 0


@dataclass(frozen=True)
class Step:
    """A step of a model in a recipe."""

    config: RunConfig

    @cached_property
    def parts(self) -> StepParts:
        update = {"attention": ATTENTION, "generation": GENERATION}
        stack = profiles.stack("megascale").model_copy(update=update)
        return StepParts(self.config, profiles.hardware(HARDWARE), stack)

    @cached_property
    def launches(self) -> list[Launch]:
        """The launches of a layer and micro-batch."""
        return count(self.config)

    @property
    def times(self) -> int:
        """The number of layers times micro-batches."""
        return self.config.model.num_layers * self.config.num_microbatches

    def stream(self, nbytes: float) -> float:
        """Return the milliseconds in which kernels move bytes."""
        return 1e3 * self.parts.layers.kernels.stream(nbytes)

    @cached_property
    def milliseconds(self) -> dict[str, float]:
        """Milliseconds by kind of kernel."""
        found, layers = defaultdict[str, float](float), self.parts.layers
        for launch in self.launches:
            once = launch.name == WEIGHTS
            purpose = "quantise" if once else classify(f"aten::{launch.name}")
            found[purpose] += self.stream(
                (launch.read + launch.written) * (self.config.model.num_layers if once else self.times)
            )
        logits = layers.tokens * padded_vocab(self.config.model, 1) * layers.kernels.bytes
        found["loss"] += self.config.num_microbatches * self.stream(LOSS_PASSES * logits)
        found |= {name: 1e3 * self.parts.estimate.causes[name] for name in PLANNED}
        return {name: found[name] for name in ALL_PURPOSES if name in found}

    @property
    def total(self) -> float:
        """Milliseconds of a step."""
        return sum(self.milliseconds.values())

    @cached_property
    def savings(self) -> dict[str, Saving]:
        """Savings of kernels that are not built, of a layer and micro-batch, by name."""
        return {saving.what: saving for saving in savings(self.config, self.launches)}

    def saved(self, what: str) -> float:
        """Return the milliseconds of a step that a kernel would save."""
        return self.times * self.stream(self.savings[what].nbytes)

    @cached_property
    def left_at_read(self) -> float:
        """Milliseconds of updates before the device when the host reads the totals (`train.step`): all but the first
        bucket's.
        """
        c = self.config
        buckets = [each for chunk in bucket_sizes(c.model, c.parallel, c.overlap, c.train, 0) for each in chunk]
        return self.milliseconds["optimizer"] * (1 - buckets[0].numel / sum(each.numel for each in buckets))

    @property
    def fp8_gemms(self) -> tuple[float, float]:
        """Milliseconds of the FP8 GEMMs by the planner's rates, and by those assumed."""
        planned = self.milliseconds["gemm"] - self.head
        forward, backward = ASSUMED[self.config.fp8.facts["granularity"]]
        return planned, self.tflop * 1e3 * (1 / forward + 2 / backward)

    @property
    def tflop(self) -> float:
        """TFLOP of the layers' GEMMs in forward."""
        weights = sum(layer.weight_numel for layer in linears(block_spec(self.config.model, 0)))
        return 2e-12 * self.parts.layers.tokens * weights * self.times

    @property
    def planned_rate(self) -> float:
        """TFLOP/s of the FP8 GEMMs by the planner."""
        return 3e3 * self.tflop / self.fp8_gemms[0]

    @property
    def head(self) -> float:
        """Milliseconds of the head's GEMMs, in bf16."""
        head = self.parts.layers.head()
        return 1e3 * self.config.num_microbatches * (head.forward.gemm + head.backward.gemm)


Steps = Mapping[str, Mapping[str, Step]]
"""Steps by the path of a configuration, and by recipe."""


def measured(text: str) -> dict[str, float]:
    """Return the measured milliseconds by kind of kernel, from the page's shares of a step in bf16."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    step = next(float(row[3]) for row in rows if row[1:3] == [BF16, "megascale"])
    place, head = next((place, row) for place, row in enumerate(rows) if row[0] == "megascale's step")
    shares = next(row for row in rows[place + 1 :] if row[1] == BF16)
    pairs = zip(head, shares, strict=True)
    return {name: step * float(share.rstrip("%")) / 100 for name, share in pairs if share.endswith("%")}


def estimates(steps: Steps, found: Mapping[str, float]) -> Iterator[str]:
    """Tabulate the milliseconds of every model."""
    yield (
        f"Milliseconds of a step by kind of kernel: measured in bf16, as above, and **estimated** for {HARDWARE} by "
        f"`{own_command()}`, with attention by {ATTENTION}. No estimate was measured."
    )
    for path, by_recipe in steps.items():
        columns = {"measured, bf16": found} if path == CONFIG else {}
        columns |= {name: step.milliseconds for name, step in by_recipe.items()}
        names = dict.fromkeys(name for each in columns.values() for name in each)
        rows = [[name, *(f"{each[name]:.1f}" if each.get(name) else "" for each in columns.values())] for name in names]
        sums = ["all", *(f"{sum(each.values()):.1f}" for each in columns.values())]
        yield from ("", *pipes([by_recipe[BF16].config.name, *columns], *rows, sums))


def gains(steps: Steps, found: Mapping[str, float]) -> Iterator[str]:
    """Tabulate the speed-ups over bf16, with the verdicts on the bars."""
    estimated = steps[CONFIG][BF16].milliseconds
    factors = {name: found[name] / estimated[name] for name in estimated}
    first, *_ = ({each[name].config.fp8.facts["granularity"]: each[name] for name in HOPPER} for each in steps.values())
    rates = (
        f"{ASSUMED[grain][0]:,} and {ASSUMED[grain][1]:,}, and {step.planned_rate:,.0f} (scales by {grain})"
        for grain, step in first.items()
    )
    yield (
        "Tokens/s over those of bf16, **estimated**. Kernels in 16 bits, attention and GEMMs among them, take their "
        "estimate times measured / estimated of the slice of Llama 3 8B; idle is as measured. **Nothing of FP8 is "
        "measured, nor the slice of GPT-3 175B**: a range is between two rates of FP8 GEMMs, with wgrad in Triton as "
        "fast as cuBLAS. In TFLOP/s, as assumed in forward and backward, and the planner's mean for "
        f"{steps[CONFIG][BF16].config.name}: {'; '.join(rates)}. Casts move their bytes at the planner's bandwidth."
    )
    heads, cells = ["recipe"], {name: [name] for name in HOPPER}
    for path, by_recipe in steps.items():
        heads += [by_recipe[BF16].config.name, "bar", "verdict"]
        for name, row in cells.items():
            plain, fp8 = by_recipe[BF16], by_recipe[name]
            row.extend(verdict(speed_ups(plain, fp8, factors, found["idle"]), CASES[path].get(name)))
    yield from ("", *pipes(heads, *cells.values()))


def verdict(speed_ups: Sequence[float], bar: float | None) -> list[str]:
    """Format speed-ups from the lowest to the highest, a bar, and whether they reach it."""
    low, high = speed_ups
    words = (
        "" if bar is None else "met" if low >= bar else "**missed**" if high < bar else "**missed** at the lower rate"
    )
    return [f"{low:.2f} to {high:.2f}", f"{bar:.2f}" if bar else "", words]


def speed_ups(plain: Step, fp8: Step, factors: Mapping[str, float], idle: float) -> list[float]:
    """Return the speed-ups of a recipe by its two rates, the lower one first."""
    before = idle + sum(factors[name] * value for name, value in plain.milliseconds.items())
    others = (factors.get(name, 1.0) * value for name, value in fp8.milliseconds.items() if name != "gemm")
    rest = idle + sum(others) + factors["gemm"] * fp8.head
    return sorted(before / (rest + gemms) for gemms in fp8.fp8_gemms)


def not_built(steps: Steps) -> Iterator[str]:
    """Tabulate what is not built: what it would save of the first model's layers, and its largest share over the
    recipes of every model's step.
    """
    first, *_ = steps.values()
    found = defaultdict[Saving, list[str]](list)
    for name, step in first.items():
        for saving in step.savings.values():
            found[saving].append(name)
    rows, shares = list[list[str]](), list[list[float]]()
    for (what, launches, nbytes), names in found.items():
        where, saved = "all" if len(names) == len(first) else ", ".join(names), first[names[0]].saved(what)
        rows.append([what, where, str(launches), f"{nbytes / 1e6:,.0f}", f"{saved:.1f}"])
        shares.append([max(each[name].saved(what) / each[name].total for name in names) for each in steps.values()])
    much = [f"{row[0]} ({row[1]})" for row, share in zip(rows, shares, strict=True) if max(share) > MUCH]
    models = [each[BF16].config.name for each in steps.values()]
    yield (
        f"At most saved: launches and MB of a layer and micro-batch of {models[0]}, ms of its step at the planner's "
        f"bandwidth of the {HARDWARE}, and the share of the estimated step in the recipe with the largest."
    )
    lines = [[*row, *(f"{each:.2%}" for each in share)] for row, share in zip(rows, shares, strict=True)]
    yield from ("", *pipes(["not built", "in", "launches", "MB", "ms", *(f"of {name}" for name in models)], *lines))
    yield from ("", f"More than {MUCH:.0%} of a step, and left: {'; '.join(much) or 'none'}.")


def refuted(steps: Steps, host_ms: float) -> str:
    """Say what the host's wait for the totals costs. `host_ms`: from the read to the next first forward."""
    left = (f"{each[BF16].left_at_read:.1f} ms of {each[BF16].config.name}" for each in steps.values())
    return (
        "Refuted: first forwards before the totals are read, and a CUDA graph of the update. At the read the device "
        f"still has the updates of all buckets but the first before it, {' and '.join(left)}, as estimated in bf16. "
        f"The host takes {host_ms:.1f} ms from there to the first forward, in a narrow model of as many layers on this "
        "machine: the device does not wait for it. Of a step in which many ranks share the updates, it is the most "
        "that could be gained."
    )
