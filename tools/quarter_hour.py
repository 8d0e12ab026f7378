#!/usr/bin/env python3
"""Write the results of `tools/gpu_quarter_hour.sh` as one JSON file and one table in Markdown.

A part NAME has NAME.status (exit status, seconds, expected seconds, limit, command), and its JSON object in NAME.json
or as the last that begins a line of NAME.out. `left-out` has a line for each part that the last call did not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from pathlib import Path
from typing import Any

from megascale.core.files import write_text
from results import pipes


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path, help="folder of the parts' outputs")
    parser.add_argument("out", type=Path, help="path of the two files, without suffix")
    options = parser.parse_args()
    parts = {path.stem: read_part(path) for path in sorted(options.state.glob("*.status"), key=began)}
    left_out = (line.split(maxsplit=1) for line in (options.state / "left-out").read_text("utf-8").splitlines())
    parts |= {name: {"left_out": reason} for name, reason in left_out if name not in parts}
    write_text(options.out.with_suffix(".json"), json.dumps(parts, indent=1) + "\n")
    write_text(options.out.with_suffix(".md"), "\n".join([f"# {options.out.name}", "", *table(parts)]) + "\n")
    return 0


def began(path: Path) -> float:
    """Return when a part ended; parts run one after the other."""
    return path.stat().st_mtime


def read_part(path: Path) -> dict[str, Any]:
    """Return a part's status, times and command, its figures by name, and its whole result; of a failed part the last
    lines.
    """
    *numbers, command = path.read_text(encoding="utf-8").split(maxsplit=4)
    status, seconds, expected, limit = map(int, numbers)
    file = path.with_suffix(".json")
    result = last_object((file if file.exists() else path.with_suffix(".out")).read_text(encoding="utf-8"))
    errors = path.with_suffix(".err").read_text(encoding="utf-8").splitlines() if status else []
    errors += [f"ended at its limit of {limit} s"] if status and seconds >= limit else []
    common = {"status": status, "seconds": seconds, "expected": expected, "limit": limit, "command": command.strip()}
    return common | {"figures": figures(result), "result": result, "errors": errors[-20:]}


def last_object(text: str) -> dict[str, Any]:
    """Return the last JSON object that begins a line; an empty one if none does."""
    for begin in reversed([match.start() for match in re.finditer("^{", text, re.MULTILINE)]):
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = json.JSONDecoder().raw_decode(text, begin)[0]
            return found
    return {}


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the table shows of a result: of a command of the lab, of tests, of `bench mfu`, `bench gemm` and
    `doctor`.
    """
    if "results" in result:
        return {test["name"]: "; ".join([test["outcome"], *measured(test)]) for test in result["results"]}
    if "step_s" in result:
        shares = {f"{name}, % of a step": round(100 * share, 1) for name, share in result["kernels"].items() if share}
        causal = {
            "MFU causal, %": round(100 * (result["mfu"]["causal"] or 0), 1),
            "tokens/s": round(result["tokens_per_s"]),
        }
        return {"step, ms": round(result["step_s"]["median"] * 1e3, 1), **causal, **shares}
    if "rates" in result:
        return {f"{one['shape']} {one['format']}": one["rate"] and one["rate"]["median"] for one in result["rates"]}
    facts = result.get("machine", {}) | result.get("machine", {}).get("gpu_software", {})
    return result.get("figures") or {name: value for name, value in facts.items() if isinstance(value, str)}


def measured(test: dict[str, Any]) -> list[str]:
    """Format the figures of a test."""
    return [f"{name} {one['value']:.4g} {one['unit']}".rstrip() for name, one in test["figures"].items()]


def table(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Format a row for every part, and below it one for its command and for every figure."""
    rows = [["part", "figure", "value"]]
    for name, part in parts.items():
        if "left_out" in part:
            rows.append([f"**{name}**", "not run", part["left_out"]])
            continue
        ended = f"status {part['status']}, {part['seconds']} s of {part['expected']}"
        rows.append([f"**{name}**", ended, " ".join(part["errors"][-1:])])
        rows.append(["", "command", f"`{part['command']}`"])
        rows += [["", figure, str(value)] for figure, value in part["figures"].items()]
    return pipes(*rows)


if __name__ == "__main__":
    raise SystemExit(main())
