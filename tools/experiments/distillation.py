#!/usr/bin/env python3
"""Steps of a student to a loss with and without a small teacher (SALT, arXiv 2410.18779), on the quickstart's corpus.

A teacher of two layers is trained, writes its soft labels for the student's samples (`megascale data teacher`), and
students of four layers learn without it, with it in the first half of their steps, and with it to the end. `megascale
quickstart` makes the data. `--write` makes docs/results/distillation.md; about ten minutes of a core.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from curves import ONE_PROCESS, ROOT, Curve, path, plan, table

from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.layout.parameters import parameter_count
from megascale.plan.account.flops import model_flops

CONFIG = "configs/quickstart.toml"
TEACHER = ("model.num_layers=2", "model.hidden_size=128", "model.num_heads=4", "model.ffn_size=512")
STUDENT = ("model.num_layers=4", "model.hidden_size=192", "model.num_heads=6", "model.ffn_size=768")
ALPHA = 0.5
HEAD = ("student", "validation loss", "steps to the plain loss", "training FLOPs of the student", "with the teacher's")


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="steps of a student (default: 80)")
    parser.add_argument("--teacher-steps", type=int, default=320, help="steps of the teacher (default: 320)")
    parser.add_argument("--top-k", type=int, default=32, help="the teacher's tokens for a label (default: 32)")
    parser.add_argument("--output", type=path, default="runs/distillation", metavar="DIR", help="folder of the runs")
    parser.add_argument("--write", action="store_true", help="write docs/results/distillation.md")
    options = parser.parse_args()
    steps, labels = options.steps, options.output / "teacher.labels"
    common = [*ONE_PROCESS, "checkpoint.every=100000"]
    taught = [
        *TEACHER,
        *common,
        f"train.steps={options.teacher_steps}",
        f"train.eval_every={options.teacher_steps // 40}",
    ]
    teacher = plan(CONFIG, options.output, {"teacher": taught})["teacher"].train()
    every = max(1, steps // 10)
    students = [*STUDENT, *common, f"train.steps={steps}", f"train.eval_every={every}", f"train.log_every={every}"]
    if not labels.exists():
        write_labels(students, options.output / "teacher", labels, options.top_k)
    soft = [*students, f"train.distill_teacher={labels}", f"train.distill_top_k={options.top_k}"]
    soft += [f"train.distill_alpha={ALPHA}"]
    variants = {
        "plain": students, "teacher in the first half": [*soft, f"train.distill_until_step={steps // 2}"],
        "teacher to the end": soft,
    }  # fmt: skip
    planned = plan(CONFIG, options.output, {name.replace(" ", "-"): keys for name, keys in variants.items()})
    curves = {name: run.train() for name, run in zip(variants, planned.values(), strict=True)}
    flops = [flops_per_token(words) for words in (TEACHER, STUDENT)]
    parts = [table(rows(curves, steps, flops, options.teacher_steps), HEAD), verdict(curves, steps)]
    print("\n\n".join(parts))
    if options.write:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from results import write_page

        sizes = [parameter_count(configured(words).model) / 1e6 for words in (TEACHER, STUDENT)]
        measured = (
            f"A teacher of {sizes[0]:.1f} million parameters, after {options.teacher_steps} steps at a validation "
            f"loss of {teacher.last:.3f}; students of {sizes[1]:.1f} million, trained for {steps} steps of the "
            f"same batch on the quickstart's corpus, with alpha = {ALPHA} of the KL to the teacher's {options.top_k} "
            "likeliest tokens or without. One seed. FLOPs are in 10^12; a teacher's are its training and one forward "
            "over the samples that it labels."
        )
        write_page("distillation", "Distillation from a small teacher", measured, parts)


def configured(words: Sequence[str]) -> RunConfig:
    """Return the configuration with overrides."""
    return load_config(str(ROOT / CONFIG), [*words, *ONE_PROCESS], skip_sections=["data"])


def flops_per_token(words: Sequence[str]) -> float:
    """Count the training FLOPs of a model per token."""
    return model_flops(configured(words)).causal


def write_labels(student: Sequence[str], teacher: Path, labels: Path, top_k: int) -> None:
    """Write the soft labels. Raises: SystemExit if that fails"""
    command = [sys.executable, "-m", "megascale", "data", "teacher", CONFIG, *student, "--checkpoint", str(teacher),
               "--output", str(labels), f"train.distill_top_k={top_k}"]  # fmt: skip
    if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(status)


def rows(curves: Mapping[str, Curve], steps: int, flops: Sequence[float], teacher_steps: int) -> list[list[str]]:
    """Return the table's rows. `flops`: per token of the teacher and the student."""
    goal, tokens = curves["plain"].last, curves["plain"].valid_tokens[-1]
    found = []
    for name, curve in curves.items():
        own, part = flops[1] * tokens / 1e12, {"plain": 0.0, "teacher in the first half": 0.5}.get(name, 1.0)
        teacher = flops[0] * tokens * (teacher_steps / steps + part / 3) / 1e12 if part else 0.0
        reached = steps_to(curve, goal, steps)
        shown = f"{reached:.0f}" if reached is not None else "not reached"
        found.append([name, f"{curve.last:.4f}", shown, f"{own:.1f}", f"{own + teacher:.1f}"])
    return found


def steps_to(curve: Curve, goal: float, steps: int) -> float | None:
    """Return the steps to a validation loss, interpolated between evaluations; None if it is not reached."""
    every = [steps * tokens / curve.valid_tokens[-1] for tokens in curve.valid_tokens]
    for (before, high), (after, low) in pairwise(zip(every, curve.valid_loss, strict=True)):
        if low <= goal:
            return before + (after - before) * (high - goal) / (high - low) if high > low else after
    return None


def verdict(curves: Mapping[str, Curve], steps: int) -> str:
    """Say what the teacher saves."""
    goal = curves["plain"].last
    reached = {name: steps_to(curve, goal, steps) for name, curve in curves.items() if name != "plain"}
    saved = {name: 1 - count / steps for name, count in reached.items() if count is not None}
    if not saved or max(saved.values()) <= 0:
        return f"No student with a teacher reaches the plain student's loss, {goal:.4f}, in fewer steps."
    name = max(saved, key=saved.__getitem__)
    said = f"With a {name} the plain student's loss, {goal:.4f}, takes {saved[name]:.0%} fewer steps."
    return f"{said} It saves FLOPs only if the teacher serves other runs too: compare the last column."


if __name__ == "__main__":
    main()
