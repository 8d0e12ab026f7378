#!/usr/bin/env python3
"""Write the Grafana dashboards of megascale's metrics, configs/observe/grafana/*.json, from their panels.

`make docs` runs it. The dashboards ask for a Prometheus data source and a run when they are opened.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    SortOrder,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableHide, VariableRefresh

from grafana_hosts import HOSTS
from grafana_job import INCIDENTS, MARKS, OVERVIEW, RANKS
from grafana_panels import Board, Panel
from megascale.core.files import write_text

FOLDER = Path(__file__).parents[1] / "configs" / "observe" / "grafana"

BOARDS = (OVERVIEW, RANKS, HOSTS, INCIDENTS)

SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")

WIDTH, COLUMNS = 24, {"curves": 3, "value": 6}
HEIGHT = {"curves": 8, "value": 4}
"""Grafana's grid, panels in a row of it, and their heights."""


def main() -> int:
    """Write the dashboards. Exit status: 0."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for board in BOARDS:
        write_text(FOLDER / f"{board.uid}.json", text_of(board))
    return 0


def text_of(board: Board) -> str:
    """Return a dashboard as JSON."""
    built = dashboard.Dashboard(board.title).uid(board.uid).tags(["megascale"]).refresh("30s").time("now-3h", "now")
    built = built.with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    built = built.with_variable(_variable("run", "Run", "label_values(megascale_rank_step, run)"))
    if board.nodes:
        nodes = _variable("node", "Node", 'label_values(megascale_host_load1{run="$run"}, node)')
        built = built.with_variable(nodes.multi(True).include_all(True).all_value(".*"))
    for name, color, query in MARKS:
        mark = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(color).expr(query)
        built = built.annotation(mark)
    numbers = itertools.count(1)
    for title, panels in board.rows:
        built = built.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            built = built.with_panel(_panel(panel).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE)
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).hide(VariableHide.DONT_HIDE)


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    width, height = WIDTH // COLUMNS[panel.kind], HEIGHT[panel.kind]
    built = _value() if panel.kind == "value" else _curves(panel)
    built = built.title(panel.title).unit(panel.unit).datasource(SOURCE).span(width).height(height)
    built = built.description(panel.help) if panel.help else built
    for number, (query, legend) in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number))
        built = built.with_target(target)
    return built


def _value() -> stat.Panel:
    last = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().reduce_options(last).graph_mode(BigValueGraphMode.NONE)


def _curves(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST)
    legend = legend.placement(LegendPlacement.BOTTOM).calcs([])
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    built = timeseries.Panel().line_width(1).fill_opacity(0).legend(legend).tooltip(tooltip)
    if panel.log:
        built = built.scale_distribution(common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    return built


if __name__ == "__main__":
    sys.exit(main())
