#!/usr/bin/env python3
"""Draw the pictures of the architecture: ranks in the 3D layout above a step of their schedule, and the processes of
`megascale launch`. Places of ranks, groups, layers and actions are those of the code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from megascale.core.files import write_text
from megascale.layout.stages import Placement, looped, split_layers
from megascale.layout.topology import Coord, Topology
from megascale.operate.show.charts.shapes import GREY, STYLE, document, line, rect, text
from megascale.operate.show.charts.timeline import COLOURS
from megascale.plan.simulate.event_simulator import Simulation, Span, StageTimes, simulate
from megascale.plan.simulate.profiles import Overlaps
from megascale.schedule.interleaved import interleaved_1f1b
from megascale.schedule.ir import COMPUTE_KINDS, build_schedule

FOLDER = Path(__file__).parents[1] / "docs/pictures"

TOPOLOGY, NODE_RANKS, CHUNKS, LAYERS, MICROBATCHES = Topology(tp=8, dp=2, pp=4), 8, 2, 32, 8
"""The job of the picture: nodes of NODE_RANKS, CHUNKS model chunks a rank, LAYERS, and micro-batches of a step."""

MARKED = TOPOLOGY.rank(Coord(tp=3, dp=0, pp=2))
"""The rank whose groups are coloured."""

BACKWARD_FACTOR, MESSAGE, COLLECTIVE = 2.0, 0.15, 1.2
"""Times of a backward, a message and a collective over dp of a chunk, in forwards of a chunk."""

CELL, NODE_GAP, ROW_GAP, LEFT, TOP = 24, 34, 52, 96, 58  # pixels
SECOND = {"forward": "#66b2dd", "backward": "#5fc9a5"}  # colours of the second chunk
BAR, PITCH, MARGIN = 18, 34, 20  # pixels: height of an action, distance of ranks, right of the picture

BOX = 44  # pixels: height of a process

STYLED = f"<style>{STYLE} svg .light {{ fill: white }} svg .dim {{ fill: #777 }}</style>"

ARROW = (
    "<defs><marker id='arrow' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='9' markerHeight='9' "
    "markerUnits='userSpaceOnUse' orient='auto-start-reverse'><path d='M0 0L8 4L0 8z' fill='#555'/></marker></defs>"
)


def main() -> int:
    """Run the tool. Exit status: 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0] + ".")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the pictures")
    options = parser.parse_args()
    for name, picture in PICTURES.items():
        write_text(options.output / name, picture() + "\n")
        print(options.output / name)
    return 0


def layout_picture() -> str:
    """Draw the nodes with their ranks, and a step of the marked rank's pipeline below."""
    placement = looped(TOPOLOGY.pp, CHUNKS)
    node_width, below = NODE_RANKS * CELL, TOP + TOPOLOGY.dp * (CELL + ROW_GAP)
    width = LEFT + TOPOLOGY.pp * (node_width + NODE_GAP) + MARGIN - NODE_GAP
    body = [STYLED, ARROW, *_nodes(), *_pipeline_arrows(), *_stage_labels(placement, below - 12)]
    first = below + 42
    body += _step(placement, first, width)
    title = (
        f"rank {MARKED} in a layout of tp {TOPOLOGY.tp} (inside a node), dp {TOPOLOGY.dp} (down) and pp {TOPOLOGY.pp} "
        f"(across): {TOPOLOGY.world_size} GPUs, and a step of interleaved 1F1B"
    )
    return document(width, first + TOPOLOGY.pp * PITCH + 48, title, body)


def _place(rank: int) -> tuple[float, float]:
    """Return the upper left corner of a rank's cell."""
    at = TOPOLOGY.coord(rank)
    return LEFT + at.pp * (NODE_RANKS * CELL + NODE_GAP) + at.tp * CELL, TOP + at.dp * (CELL + ROW_GAP)


def _nodes() -> Iterator[str]:
    """Draw all ranks in the boxes of their nodes, in the colours of the marked rank's groups."""
    colours = {rank: COLOURS[axis] for axis in ("tp", "dp", "pp") for rank in TOPOLOGY.group(MARKED, axis)}
    colours[MARKED] = COLOURS["wait"]
    for rank in range(TOPOLOGY.world_size):
        x, y = _place(rank)
        if rank % NODE_RANKS == 0:
            yield rect(x - 4, y - 4, NODE_RANKS * CELL + 8, CELL + 8, "#e5e5e5")
            yield text(x - 4, y - 8, f"node {rank // NODE_RANKS}")
        yield rect(x + 1, y + 1, CELL - 2, CELL - 2, colours.get(rank, "white"))
        yield text(x + CELL / 2, y + 16, str(rank), "middle")
    for dp in range(TOPOLOGY.dp):
        y = _place(TOPOLOGY.rank(Coord(dp=dp)))[1]
        yield text(LEFT - 14, y + 16, f"replica {dp}", "right")
    x, y = _place(MARKED)
    yield line(x + CELL / 2, y + CELL + 3, f"v{ROW_GAP - 6}", COLOURS["dp"], _ends(2))
    yield text(x + CELL / 2 + 8, y + CELL + ROW_GAP / 2 + 4, "dp: gradients and weights")
    node = x - TOPOLOGY.coord(MARKED).tp * CELL
    yield line(node, y - 24, f"h{NODE_RANKS * CELL}", COLOURS["tp"], _ends(2))
    yield text(node + NODE_RANKS * CELL / 2, y - 30, "tp: activations of every layer", "middle")


def _ends(width: float) -> str:
    return f" stroke-width='{width}' marker-start='url(#arrow)' marker-end='url(#arrow)'"


def _pipeline_arrows() -> Iterator[str]:
    """Draw the messages between the stages of the marked rank's replica."""
    dp = TOPOLOGY.coord(MARKED).dp
    for pp in range(TOPOLOGY.pp - 1):
        x, y = _place(TOPOLOGY.rank(Coord(tp=NODE_RANKS - 1, dp=dp, pp=pp)))
        yield line(x + CELL + 6, y + CELL / 2, f"h{NODE_GAP - 12}", COLOURS["pp"], _ends(2))
    yield text(LEFT, TOP + CELL + ROW_GAP / 2 + 4, "pp: activations and their gradients")


def _stage_labels(placement: Placement, y: float) -> Iterator[str]:
    """Name the layers of every pipeline rank's chunks."""
    stages = split_layers(LAYERS, placement)
    yield text(LEFT - 14, y + 14, f"{LAYERS} layers", "right")
    for pp in range(TOPOLOGY.pp):
        x = LEFT + pp * (NODE_RANKS * CELL + NODE_GAP)
        parts = [stages.layers(stages.index(pp, chunk)) for chunk in range(CHUNKS)]
        words = ", ".join(f"chunk {chunk}: {part[0]} to {part[-1]}" for chunk, part in enumerate(parts))
        yield text(x + NODE_RANKS * CELL / 2, y, f"stage {pp}", "middle")
        yield text(x + NODE_RANKS * CELL / 2, y + 14, words, "middle")
    order = f"Activations pass chunk 0 of stages 0 to {TOPOLOGY.pp - 1}, then chunk 1; gradients go back."
    yield text(LEFT, y + 34, order, "dim")


def step_of(placement: Placement) -> Simulation:
    """Simulate a step of the schedule."""
    places = placement.places
    times = StageTimes(
        dict.fromkeys(places, 1.0), dict.fromkeys(places, BACKWARD_FACTOR), MESSAGE, 0.0,
        dict.fromkeys(places, COLLECTIVE), dict.fromkeys(places, COLLECTIVE), dict.fromkeys(places, 4),
    )  # fmt: skip
    order = build_schedule(interleaved_1f1b, TOPOLOGY.pp, CHUNKS, MICROBATCHES)
    return simulate(order, placement, times, Overlaps(tp="none", pp=True, dp=True), spans=True)


def _step(placement: Placement, top: float, width: float) -> Iterator[str]:
    """Draw the step: a row of compute and a thin one of dp for each pipeline rank."""
    simulation = step_of(placement)
    scale = (width - LEFT - MARGIN) / simulation.last
    ranks = TOPOLOGY.group(MARKED, "pp")
    for row, rank in enumerate(ranks):
        y = top + row * PITCH
        yield text(LEFT - 14, y + 13, f"rank {rank}", "title right" if rank == MARKED else "right")
        yield rect(LEFT, y, width - LEFT - MARGIN, BAR, "#e5e5e5")
        for span in simulation.spans:
            if span.rank == row and span.waited is None and span.row in ("compute", "dp"):
                yield from _bar(span, LEFT + span.start * scale, y, (span.end - span.start) * scale)
            elif span.rank == row and span.row == "dp" and span.action.kind == "REDUCE":
                yield rect(LEFT + span.start * scale, y + BAR + 2, (span.end - span.start) * scale, 6, COLOURS["dp"])
    y = top + TOPOLOGY.pp * PITCH
    yield line(LEFT, y, f"h{width - LEFT - MARGIN:.0f}", GREY, " marker-end='url(#arrow)'")
    yield text(width - MARGIN, y + 14, "time", "right")
    yield from _legend(y + 34)


def _bar(span: Span, x: float, y: float, width: float) -> Iterator[str]:
    if span.row == "dp":
        yield rect(x, y + BAR + 2, width, 6, COLOURS["dp"])
        return
    runs = COMPUTE_KINDS[span.action.kind].runs
    yield rect(x, y, width - 1, BAR, SECOND[runs] if span.action.chunk else COLOURS[runs])
    yield text(x + width / 2 - 0.5, y + 13, str(span.action.microbatch), "middle light")


def _legend(y: float) -> Iterator[str]:
    x = float(LEFT)
    for colour, words in (
        (COLOURS["forward"], "forward, chunk 0"), (SECOND["forward"], "forward, chunk 1"),
        (COLOURS["backward"], "backward, chunk 0"), (SECOND["backward"], "backward, chunk 1"),
        (COLOURS["dp"], "dp: all-gather, reduce-scatter"), ("#e5e5e5", "bubble"),
    ):  # fmt: skip
        yield rect(x, y - 10, 12, 12, colour)
        yield text(x + 17, y, words)
        x += 30 + 5.3 * len(words)
    yield text(x - 6, y, "number: micro-batch")


def driver_picture() -> str:
    """Draw the processes of `megascale launch`: on the launching host, on two nodes and on a spare."""
    body = [STYLED, ARROW]
    body += _process(20, 40, 250, "supervisor (megascale launch)", "holds lock, secret, port; restarts the driver")
    body += _process(20, 124, 250, "driver", "finds causes, decides, writes incidents.jsonl")
    body += _process(20, 208, 250, "scheduler", "local, Slurm or Kubernetes: starts agents")
    body.append(line(145, 40 + BOX, "V124", GREY, " marker-end='url(#arrow)'"))
    body.append(text(152, 108, "starts, watches"))
    body.append(line(145, 208, f"V{124 + BOX}", GREY, " marker-start='url(#arrow)'"))
    body.append(text(152, 192, "asks for nodes"))
    for number, (name, spare) in enumerate((("node 0", False), ("node 1", False), ("node 2, a spare", True))):
        body += _node(380, 40 + number * 84, name, spare)
        y = 40 + number * 84 + BOX / 2
        body.append(line(272, 124 + BOX / 2 + 12 * (number - 1), f"L378 {y:.0f}", GREY, _ends(1)))
    body.append(text(325, 48, "orders, heartbeats", "middle"))
    return document(940, 316, "processes of megascale launch", [*body, *_driver_notes()])


def _process(x: float, y: float, width: float, name: str, task: str) -> Iterator[str]:
    yield rect(x, y, width, BOX, COLOURS["forward"])
    yield rect(x + 2, y + 2, width - 4, BOX - 4, "white")
    yield text(x + 8, y + 17, name, "title")
    yield text(x + 8, y + 33, task)


def _node(x: float, y: float, name: str, spare: bool) -> Iterator[str]:
    yield rect(x, y - 8, 545, BOX + 16, "#e5e5e5")
    yield from _process(x + 8, y, 190, f"agent, {name}", "starts, watches, ends ranks")
    for rank in range(4):
        left = x + 250 + rank * 72
        yield rect(left, y, 64, BOX, "#f2f2f2" if spare else COLOURS["backward"])
        number = rank + 4 * int(name.split()[1].rstrip(","))
        yield text(left + 32, y + 26, "standby" if spare else f"rank {number}", "middle" if spare else "middle light")
    yield line(x + 198, y + BOX / 2, "h50", GREY, " marker-end='url(#arrow)'")


def _driver_notes() -> Iterator[str]:
    lines = (
        "If the driver dies, ranks go on; its successor reads incidents.jsonl. If an agent dies, its ranks die:",
        "the driver replaces the node by the spare, and ranks resume from copies in memory or from storage.",
    )
    yield from (text(380, 292 + 16 * row, words) for row, words in enumerate(lines))


PICTURES = {"driver.svg": driver_picture, "layout-3d.svg": layout_picture}


if __name__ == "__main__":
    sys.exit(main())
