"""The examples of docs/slow-runs.md: what the commands print about the paper's two stories, and about a loss that
spikes in a real run; and the pictures of docs/pictures.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab.fleet import Fleet
from lab.fleet_tables import FLOPS, PEAK_FLOPS, cube_of, write_store
from lab.paper_stories import mfu_decay, slow_machines
from megascale.core.files import write_text
from megascale.operate.diagnose.slow.heatmap import slowness
from megascale.operate.show.charts.report_charts import Mark, Series, grid_chart, line_chart
from megascale.operate.show.charts.shapes import GREEN, ORANGE, STYLE
from megascale.operate.show.html_report import SLOWNESS_LEVELS
from megascale.operate.show.rank_grid import rank_matrix

ROOT = Path(__file__).parents[1]

SMOOTH = 10
"""Steps that a point of the MFU's curve is the mean of."""

TEXT, DOCUMENTS, STEPS = "all is well", 13_000, 300
"""The text of all documents but one, their number, and steps of the run whose loss spikes."""

SPIKING = """
[model]
num_layers = 2
hidden_size = 64
num_heads = 4
vocab_size = 257
seq_length = 64
[parallel]
[batch]
micro = 8
global = 8
[train]
precision = "fp32"
log_every = 1
eval_every = 0
[optimizer]
lr = 5e-3
warmup_steps = 10
[data]
train = "TRAIN"
tokenizer = "bytes"
[checkpoint]
every = 100000
[observe]
tensorboard = false
"""


def main() -> int:
    """Run the tool. Exit status: 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/pictures", help="folder of the pictures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megascale-pictures-") as scratch:
        folder = Path(scratch)
        fleet, slow = slow_machines()
        print(f"slow: {', '.join(slow)}")
        tell(fleet, folder / "slow-machines", ["diagnose", "--slow"], ["events", "slowest-ranks"])
        write(options.output / "slow-machines.svg", heat_map(fleet))
        decay = mfu_decay()
        tell(decay, folder / "mfu-decay", ["diagnose", "--mfu"], ["diagnose", "--slow"])
        write(options.output / "mfu-decay.svg", decay_chart(decay))
        write(options.output / "loss-spike.svg", spike_chart(folder))
    return 0


def tell(fleet: Fleet, run: Path, *commands: Sequence[str]) -> None:
    """Write a job's store, and print what commands say about it."""
    write_store(fleet, run)
    for name, *words in commands:
        print(f"\n$ megascale {name} RUN {' '.join(words)}", flush=True)
        subprocess.run([sys.executable, "-m", "megascale", name, str(run), *words], check=True)


def heat_map(fleet: Fleet) -> str:
    """Draw the compute time of each rank beside its peers."""
    cube, matrix = cube_of(fleet), rank_matrix(fleet.layout.topology)
    excess = matrix.of(slowness(cube))
    title = f"compute time of {len(cube.places.rank):,} ranks beside their peers"
    return grid_chart(title, excess, SLOWNESS_LEVELS, matrix.labels, lambda row, column: "")


def decay_chart(fleet: Fleet) -> str:
    """Draw the MFU of each step, and how far apart ranks enter the last reduction, as a share of the step."""
    groups = fleet.entered.transpose(0, 1, 3, 2)  # [S, pp, tp, replica]
    spread = (groups.max(3) - groups.min(3)).mean((1, 2))
    steps, mfu, share = (values[: len(values) // SMOOTH * SMOOTH].reshape(-1, SMOOTH).mean(1) for values in (
        np.arange(1.0, len(spread) + 1), FLOPS / PEAK_FLOPS / fleet.seconds, spread / fleet.seconds))  # fmt: skip
    series = [
        Series("MFU", steps, mfu, GREEN),
        Series("spread of the entries into the last gradient reduction, of the step", steps, share, ORANGE),
    ]
    return line_chart("MFU and share of the step", series, (), lambda value: f"{100 * value:.0f}%")


def spike_chart(folder: Path) -> str:
    """Train on documents of which one is garbage, print the alerts and what the step has read, and draw the loss."""
    documents = [TEXT] * DOCUMENTS
    documents[DOCUMENTS // 2] = "".join(chr(code) for code in np.random.default_rng(1).integers(33, 127, 100))
    (folder / "log.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8"
    )
    words = ["data", "prepare", str(folder / "log.jsonl"), "--output", str(folder / "log"), "--tokenizer", "bytes"]
    run_quietly(*words)
    config = folder / "spike.toml"
    config.write_text(SPIKING.replace("TRAIN", str(folder / "log")), encoding="utf-8")
    out = run_quietly("train", str(config), "name=spike", f"output_dir={folder}", f"train.steps={STEPS}")
    print("", *(line for line in out.splitlines() if "WARNING" in line), sep="\n")
    lines = (folder / "spike/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    alerts = [record for record in records if "alert" in record]
    for step in dict.fromkeys(str(record["step"]) for record in alerts):
        read = run_quietly("data", "samples", str(folder / "spike"), "--step", step)
        print(f"\n$ megascale data samples RUN --step {step}\n{read}")
    steps, values = (np.array(column) for column in zip(*losses, strict=True))
    marks = [Mark(int(record["step"]), "", "") for record in alerts if record["alert"] == "loss"]
    title = "training loss, logarithmic; dashed: alerts"
    return line_chart(title, [Series("loss", steps, values, GREEN)], marks, lambda value: f"{value:g}", log=True)


def run_quietly(*words: str) -> str:
    """Run a command, and return what it prints."""
    command = [sys.executable, "-m", "megascale", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout)
    return done.stdout


def write(path: Path, svg: str) -> None:
    """Write a picture, with its style."""
    write_text(path, svg.replace(">", f"><style>{STYLE}</style>", 1) + "\n")
    print(f"{path}: {math.ceil(path.stat().st_size / 1024)} KiB")


if __name__ == "__main__":
    sys.exit(main())
