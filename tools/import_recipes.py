#!/usr/bin/env python3
"""Import the recipes and scripts of a checkout of Megatron-LM, and write what becomes of their arguments as a page.

Every variable of a recipe has a value here. `--name` names another page.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megascale.config.foreign.imported import Arguments, Imported, import_arguments, read_arguments
from megascale.core.errors import ConfigError
from results import pipes, write_page

RECIPES = "tests/functional_tests/test_cases/"
TRAINS = re.compile(r"pretrain_\w+\.py")
MEASURED = (
    "This table counts the arguments that `megascale import-config` maps, drops with a reason and refuses, in every "
    "recipe of the functional tests, `model_config.yaml`, and every example script that trains."
)


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkout of Megatron-LM")
    parser.add_argument("--name", default="import-config", help="name of the page (default: %(default)s)")
    options = parser.parse_args()
    rows, reasons, total = [], Counter[tuple[str, str]](), Counter[str]()
    for path in recipes(options.folder):
        try:
            source = read(path)
        except ConfigError as error:
            rows.append([label(path, options.folder), "", "", "", error.problems[0].message])
            continue
        made = import_arguments(source.system, source.given, source.gpus or 8)
        row = counts(source, made)
        total.update(row)
        rows.append([label(path, options.folder), *map(str, row.values())])
        reasons.update((f"`{name}`", why) for name, why in made.refused.items())
    sums = ", ".join(f"{count:,} {word}" for word, count in total.items())
    refused = [[name, why, str(count)] for (name, why), count in sorted(reasons.items())]
    parts = [
        f"{len(rows)} recipes and scripts: {sums}.",
        "\n".join(pipes(["refused", "reason", "recipes"], *refused)),
        "\n".join(pipes(["recipe or script", *total], *rows)),
    ]
    print(write_page(options.name, "Imported recipes of Megatron-LM", MEASURED, parts))
    return 0


def recipes(folder: Path) -> Iterator[Path]:
    """Yield the recipes of the functional tests, and the example scripts that train."""
    yield from sorted(folder.glob(f"{RECIPES}*/*/model_config.yaml"))
    yield from (path for path in sorted(folder.glob("examples/**/*.sh")) if TRAINS.search(path.read_text("utf-8")))


def read(path: Path) -> Arguments:
    """Read a recipe or script, with a value for each of its variables that is a word or a path."""
    names = re.findall(r"\$\{?([A-Z]\w*)", path.read_text("utf-8")) if path.suffix == ".yaml" else ["PWD"]
    words = [] if "$#" in path.read_text("utf-8") else [f"word-{number}" for number in range(1, 10)]
    return read_arguments(str(path), words, {name: f"/{name.lower()}" for name in names})


def counts(source: Arguments, made: Imported) -> Counter[str]:
    """Count the arguments of a recipe: all that are given, and what becomes of them."""
    parts = {"mapped": len(made.mapped), "dropped": len(made.dropped), "refused": len(made.refused)}
    return Counter({"arguments": sum(parts.values()), **parts})


def label(path: Path, folder: Path) -> str:
    """Return the short name of a recipe or script."""
    name = path.parent if path.name == "model_config.yaml" else path.with_suffix("")
    return f"`{str(name.relative_to(folder)).removeprefix(RECIPES)}`"


if __name__ == "__main__":
    raise SystemExit(main())
