#!/usr/bin/env python3
"""Import every recipe and script of a checkout of Megatron-LM, and tabulate what becomes of its arguments."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megascale.config.foreign.imported import UNKNOWN, Imported, import_arguments
from megascale.config.foreign.sources import Arguments, read_arguments
from megascale.core.errors import ConfigError
from results import pipes, write_page

NO_VALUE = re.compile(r"(\w+) has no value in the script")


class _Placeholders(dict[str, str]):
    """An environment with a value for every variable that a recipe names."""

    def __init__(self, text: str) -> None:
        super().__init__({name: f"given/{name.lower()}" for name in re.findall(r"\$\{?([A-Z]\w*)", text)})


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--name", default="import-config", help="name of the page")
    options = parser.parse_args()
    rows, reasons = [], Counter[tuple[str, str]]()
    for path in recipes(options.folder):
        where = str(path.relative_to(options.folder)).removesuffix("/model_config.yaml")
        where = where.removeprefix("tests/functional_tests/test_cases/")
        try:
            source = read(path)
        except ConfigError as error:
            rows.append([where, "", "", "", error.problems[0].message])
            continue
        made = import_arguments(source.system, source.given, source.gpus or 8)
        assert UNKNOWN not in made.refused.values(), (path, made.refused)
        rows.append([where, *map(str, counts(source, made))])
        reasons.update((name.lstrip("-"), why) for name, why in made.refused.items())
    refused = [[f"`{name}`", why, str(count)] for (name, why), count in sorted(reasons.items())]
    parts = [
        "\n".join(pipes(["refused argument", "reason", "recipes"], *refused)),
        "\n".join(pipes(["recipe or script", "arguments", "mapped", "dropped", "refused"], *rows)),
    ]
    ...
    return 0


def recipes(folder: Path) -> Iterator[Path]:
    """Yield the recipes of the functional tests, and the examples' scripts that train."""
    yield from sorted(folder.glob("tests/functional_tests/test_cases/*/*/model_config.yaml"))
    for path in sorted(folder.glob("examples/**/*.sh")):
        if re.search(r"pretrain_\w+\.py", path.read_text(encoding="utf-8")):
            yield path
