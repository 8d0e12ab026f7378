"""Runs of one configuration with some keys changed, and their loss curves side by side."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.config.explain import load
from megascale.config.resolved import changes
from megascale.core.errors import ConfigError, Exit

ROOT = Path(__file__).parents[2]
"""Where the configurations are, and the corpus that they name."""

ONE_PROCESS = ("parallel.tp=1", "parallel.sp=false", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=1")


def path(text: str) -> Path:
    """An option's path, from where the tool was called."""
    return Path(text).resolve()


@dataclass(frozen=True)
class Curve:
    """What a run wrote: losses by tokens trained on, and the same on validation data."""

    tokens: list[int]
    loss: list[float]
    valid_tokens: list[int]
    valid_loss: list[float]

    @property
    def last(self) -> float:
        """The last validation loss."""
        return self.valid_loss[-1]


@dataclass(frozen=True)
class Planned:
    """A run that can begin: of `config`, which with what it names is below ROOT, with some words after it."""

    folder: Path
    config: str
    words: Sequence[str]

    def train(self) -> Curve:
        """Train, or go on with, or merely read a run that is done.

        Raises: SystemExit if it fails
        """
        command = [sys.executable, "-m", "megascale", "train", self.config, *self.words]
        if status := subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(status)
        return read(self.folder)


def plan(config: str, folder: Path, keys: Mapping[str, Sequence[str]]) -> dict[str, Planned]:
    """Runs by their names, each with keys of its own, in folders below one of an absolute path.

    Raises: SystemExit, with every mistake said, if one cannot run, or ran with other keys
    """
    planned, problems = {}, []
    for name, own in keys.items():
        run = folder / name
        words = [f"name={name}", f"observe.dir={folder}", "observe.tensorboard=false", "observe.events=false", *own]
        try:
            with contextlib.chdir(ROOT):
                wanted = load(config, words)
                made = load(str(run / "config.toml")) if (run / "config.toml").exists() else wanted
            if others := changes(made.model_dump(by_alias=True, mode="json"), wanted):
                problems.append(f"{run} was made with other keys: {', '.join(others)}  -> another --output")
        except ConfigError as error:
            problems += [str(problem) for problem in error.problems]
        planned[name] = Planned(run, config, words)
    if problems:
        print("\n".join(dict.fromkeys(problems)), file=sys.stderr)
        raise SystemExit(Exit.CONFIG)
    return planned


def read(run: Path) -> Curve:
    """The curve of a run's folder."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    tokens = {line["step"]: line["loss_tokens"] for line in steps} | {0: 0}
    valid = [line for line in lines if "valid_loss" in line]
    return Curve(
        [line["loss_tokens"] for line in steps],
        [line["loss"] for line in steps],
        [tokens[line["step"]] for line in valid],
        [line["valid_loss"] for line in valid],
    )


def draw(curves: Mapping[str, Sequence[Curve]], title: str, path: Path) -> None:
    """Draw validation losses over tokens, a line for each name, and where it has several curves the band they fill."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, group in curves.items():
        x = [tokens / 1e6 for tokens in group[0].valid_tokens]
        y = [sum(losses) / len(group) for losses in zip(*(curve.valid_loss for curve in group), strict=True)]
        (line,) = axes.plot(x, y, label=name, linewidth=1.2)
        if len(group) > 1:
            rows = list(zip(*(curve.valid_loss for curve in group), strict=True))
            axes.fill_between(x, [min(r) for r in rows], [max(r) for r in rows], color=line.get_color(), alpha=0.2)
    axes.set(xlabel="million tokens", ylabel="validation loss", title=title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def table(rows: Sequence[Sequence[Any]], head: Sequence[str]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
