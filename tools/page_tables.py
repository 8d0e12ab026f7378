#!/usr/bin/env python3
"""Write the generated tables of docs/, from the catalog and the package.

`--check` writes nothing, and exits with status 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import config_reference
import migration
import recipes
from megascale.catalog.backends import BACKENDS, KERNEL_DTYPES
from megascale.catalog.optimizers import MATRIX_UNITS, OPTIMIZERS, with_defaults
from megascale.core.files import write_text
from megascale.core.registry import Card
from megascale.operate.node.environment import COMMON_DEFAULTS, MULTI_RANK_DEFAULTS
from observe_tables import alert_rules, event_store, metrics_keys, prometheus_metrics, ready_queries
from results import filled, pipes
from status import matrix

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

SIZES = {
    "sl": "mn", "ss": "s²", "sr": "rs", "MM": "m²", "NN": "n²", "d": "d mn", "xt": "bm / 2", "yu": "bn / 2",
    "hrl": "h rl",
}  # fmt: skip
"""Sizes of state in the page's letters, by the letters of a card."""


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is out of date")
    options = parser.parse_args()
    stale = []
    for (page, name), lines in TABLES.items():
        path = DOCS / page
        before = path.read_text(encoding="utf-8")
        after = filled(before, name, "\n".join(lines()), path)
        if before != after:
            stale.append(page)
            if not options.check:
                write_text(path, after)
    if stale and options.check:
        print(f"out of date: {', '.join(stale)}  -> make docs", file=sys.stderr)
    return int(bool(stale) and options.check)


def rules() -> list[str]:
    """Tabulate the update rules of the package."""
    rows = []
    for card in OPTIMIZERS.cards.values():
        if not card.target.startswith("megascale."):
            continue
        facts = with_defaults(card.facts)
        unit = facts["unit_of_work"]
        sees = "parameter norms" if unit == "param_norms" else unit.replace("_", " ")
        options = ", ".join(f"`{key} = {toml(value)}`" for key, value in facts["options"].items())
        own = "" if unit in MATRIX_UNITS or options else "keys `betas`, `eps`, `bias_correction` of `[optimizer]`"
        rows.append([f"`{card.name}`", card.help, sees, state_size(facts), options or own])
    return pipes(["rule", "update", "sees", "state", "options"], *rows)


def toml(value: Any) -> str:
    """Format a default as in TOML."""
    return json.dumps(value) if isinstance(value, str | bool) else repr(value)


def state_size(facts: dict[str, Any]) -> str:
    """Format the elements of fp32 that a rule's state takes with default options; numbers alone are left out."""
    state = dict(facts["state"])
    for (option, value), further in facts["state_with"].items():
        if facts["options"].get(option) == value:
            state |= further
    counts = dict[str, float]()
    for name, letters in state.items():
        of, _, block = letters.partition("/")
        if size := SIZES.get(of, of):
            share = 1 / int(block) if block else 0.25 if name in facts["uint8"] else 1
            counts[size] = counts.get(size, 0) + share
    terms = [size if count == 1 else f"{float(f'{count:.2g}'):g} {size}" for size, count in counts.items()]
    return " + ".join(terms) or "0"


def backends() -> list[str]:
    """Tabulate the backends of every operation, the first choice first."""
    rows = []
    for operation, registry in BACKENDS.items():
        cards = [card for card in registry.cards.values() if card.target.startswith("megascale.")]
        for place, card in enumerate(cards):
            rows.append([operation if not place else "", f"`{card.name}`", card.help, needs(card)])
    return pipes(["operation", "backend", "implementation", "only for"], *rows)


def needs(card: Card) -> str:
    """Format the limits of a backend."""
    facts = card.facts
    parts = [", ".join(facts["variants"])]
    if facts["dtypes"] not in ((), KERNEL_DTYPES):
        parts.append("bf16")
    parts += [f"scales per {' or '.join(facts['granularities'])}"] if facts["granularities"] else []
    if facts["min_head_dim"] or facts["max_head_dim"] < math.inf:
        upper = f"up to {facts['max_head_dim']}" if facts["max_head_dim"] < math.inf else ""
        parts.append(f"head dim {upper or 'from ' + str(facts['min_head_dim'])}")
    parts += [f"rows up to {facts['max_columns']:,}"] if facts["max_columns"] < math.inf else []
    parts += ["a window, a soft cap or a document mask"] if facts["window_only"] else []
    parts += ["no dropout"] if not facts["dropout"] else []
    return "; ".join(filter(None, parts))


def folders() -> list[str]:
    """Tabulate the folders of the package in the order of import-linter, with the first paragraph of each docstring."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = {contract["name"]: contract for contract in tools["importlinter"]["contracts"]}
    rows, torchless = [], False
    for layer in contracts["imports point downward"]["layers"]:
        for name in layer.split(" | "):
            path = ROOT / name.replace(".", "/")
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            short = name.removeprefix("megascale.").replace(".", "/") + ("" if path.name == "__init__.py" else ".py")
            torchless = torchless or short == "operate/show"
            text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
            text = re.sub(r" No torch( here)?\.$|,? without torch(?=\.$)", "", " ".join(text.split()))
            rows.append([f"`{short}`", text, "no torch" if torchless else ""])
    return pipes(["folder, from top to bottom", "content", ""], *rows)


def environment() -> list[str]:
    """Tabulate the environment variables that a rank sets."""
    rows = [[f"`{each.name}`", f"`{each.value}`", each.reason] for each in (*COMMON_DEFAULTS, *MULTI_RANK_DEFAULTS)]
    return pipes(["variable", "value", "why"], *rows)


TABLES: dict[tuple[str, str], Callable[[], Iterable[str]]] = {
    ("optimizers.md", "rules"): rules,
    ("backends.md", "backends"): backends,
    ("architecture.md", "folders"): folders,
    ("launch.md", "environment"): environment,
    ("configuration.md", "keys"): config_reference.keys,
    ("configuration.md", "faults"): config_reference.faults,
    ("presets.md", "presets"): config_reference.presets,
    ("recipes.md", "recipes"): recipes.table,
    ("from-megatron.md", "defaults"): migration.defaults,
    ("from-megatron.md", "settings"): migration.settings,
    ("status.md", "status"): lambda: pipes(*matrix()),
    ("event-store.md", "ready-queries"): ready_queries,
    ("event-store.md", "event-store"): event_store,
    ("metrics.md", "metrics-keys"): metrics_keys,
    ("metrics.md", "prometheus-metrics"): prometheus_metrics,
    ("metrics.md", "alert-rules"): alert_rules,
}
"""Generated tables, by page and the name of their markers."""


if __name__ == "__main__":
    sys.exit(main())
