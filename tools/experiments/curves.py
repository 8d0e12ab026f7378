"""Comparison of training runs: variants of one configuration, and their loss curves."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.config.loading import load_config
from megascale.config.toml_writer import config_changes
from megascale.core.errors import ConfigError, Exit

ROOT = Path(__file__).parents[2]
"""Root folder of the configurations and of the corpus."""

ONE_PROCESS = ("parallel.tp=1", "parallel.sp=false", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=1")


def path(text: str) -> Path:
    """Resolve an option's path from the working directory."""
    return Path(text).resolve()


@dataclass(frozen=True)
class Curve:
    """Training and validation losses of a run, by tokens."""

    tokens: list[int]
    loss: list[float]
    valid_tokens: list[int]
    valid_loss: list[float]

    @property
    def last(self) -> float:
        """Last validation loss."""
        return self.valid_loss[-1]


@dataclass(frozen=True)
class Planned:
    """A valid run of `config`, a path relative to ROOT, with overrides `words`."""

    folder: Path
    config: str
    words: Sequence[str]

    def train(self) -> Curve:
        """Train or resume the run, and return its curve; a finished run is only read.

        Raises: SystemExit if training fails
        """
        command = [sys.executable, "-m", "megascale", "train", self.config, *self.words]
        if status := subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(status)
        return read(self.folder)


def plan(config: str, folder: Path, keys: Mapping[str, Sequence[str]]) -> dict[str, Planned]:
    """Check the runs of several variants, in subfolders of the absolute path `folder`.

    Raises: SystemExit, after printing every mistake, if a run is invalid or exists with other keys
    """
    planned, problems = {}, []
    for name, overrides in keys.items():
        run = folder / name
        words = [
            f"name={name}",
            f"output_dir={folder}",
            "observe.tensorboard=false",
            "observe.store_events=false",
            *overrides,
        ]
        try:
            with contextlib.chdir(ROOT):
                wanted = load_config(config, words)
                made = load_config(str(run / "config.toml")) if (run / "config.toml").exists() else wanted
            if changes := config_changes(*(one.model_dump(by_alias=True, mode="json") for one in (made, wanted))):
                problems.append(f"{run} was made with other keys: {', '.join(changes)}  -> give another --output")
        except ConfigError as error:
            problems += [str(problem) for problem in error.problems]
        planned[name] = Planned(run, config, words)
    if problems:
        print("\n".join(dict.fromkeys(problems)), file=sys.stderr)
        raise SystemExit(Exit.CONFIG)
    return planned


def read(run: Path) -> Curve:
    """Read the curve from a run's folder, with the evaluations after logged steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    tokens = {line["step"]: line["loss_tokens"] for line in steps} | {0: 0}
    valid = [line for line in lines if "valid_loss" in line and line["step"] in tokens]
    return Curve(
        [line["loss_tokens"] for line in steps],
        [line["loss"] for line in steps],
        [tokens[line["step"]] for line in valid],
        [line["valid_loss"] for line in valid],
    )


def draw(curves: Mapping[str, Sequence[Curve]], title: str, path: Path, baseline: str = "") -> None:
    """Plot validation losses over tokens: a line per name, with the band of several curves. `baseline`: name of the
    curve whose mean is subtracted.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    base = means(curves[baseline]) if baseline else itertools.repeat(0.0)
    for name, group in curves.items():
        x = [tokens / 1e6 for tokens in group[0].valid_tokens]
        y = [loss - less for loss, less in zip(means(group), base, strict=False)]
        (line,) = axes.plot(x, y, label=name, linewidth=1.2)
        if len(group) > 1:
            losses = zip(*(curve.valid_loss for curve in group), strict=True)
            rows = [[loss - less for loss in row] for row, less in zip(losses, base, strict=False)]
            axes.fill_between(x, [min(r) for r in rows], [max(r) for r in rows], color=line.get_color(), alpha=0.2)
    label = f"validation loss minus {baseline}" if baseline else "validation loss"
    axes.set(xlabel="million tokens", ylabel=label, title=title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def means(group: Sequence[Curve]) -> list[float]:
    """Return the mean validation loss of some curves at each evaluation."""
    return [sum(losses) / len(group) for losses in zip(*(curve.valid_loss for curve in group), strict=True)]


def table(rows: Sequence[Sequence[Any]], head: Sequence[str]) -> str:
    """Format a Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
