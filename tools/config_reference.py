#!/usr/bin/env python3
"""Write docs/configuration.md from the types of the configuration and the catalog, docs/presets.md, and the table of
docs/recipes.md.

`--check` writes nothing, and exits with status 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path

from pydantic.fields import FieldInfo

import migration
import recipes
from megascale.catalog.presets import PRESETS
from megascale.config.injection import KINDS, PHASES
from megascale.config.loading import sections
from megascale.config.model import DERIVED_FROM, ModelConfig
from megascale.config.section import Section
from megascale.config.value_words import choice_of, values_in_words
from megascale.core.files import write_text
from megascale.core.units import format_count
from megascale.layout.parameters import parameter_count

DOCS = Path(__file__).parents[1] / "docs"

INTRODUCTION = """\
# Configuration

Write a run as one TOML file, and check it before you train:

```toml
name = "my-run"
extends = "base.toml"

[model]
preset = "llama3-8b"

[parallel]
tp = 2
sp = true
```

```
megascale check run.toml --gpus 64           # every mistake: place, key, problem, hint
megascale check run.toml --gpus 64 --show    # all keys, as they are resolved
```

`check` needs neither GPUs nor torch, starts nothing, and exits with status 2 if there is a mistake. `megascale train`
makes the same checks. Start from [the first hour](first-hour.md) or [a recipe](recipes.md). Look up names of
Megatron-LM and torchtitan in [the migration table](from-megatron.md), and architectures in [presets](presets.md).

## How a value is found

Later sources override earlier ones:

1. **Defaults**, in the tables below.
2. **A preset** sets keys of `[model]`.
3. **`extends`** names a base file, relative to the folder of the extending file. Tables are merged key by key; any
   other value, lists included, replaces the base file's.
4. **The file itself.**
5. **The command line**: `megascale train run.toml model.num_layers=16 'data.train=[[0.7, "a"], [0.3, "b"]]'`. Write
   values as in TOML. A word outside TOML is a string (`parallel.schedule=gpipe`); for a key of type text, anything but
   a list is a string (`name=2026`).

Unknown keys are mistakes, and types are strict: `4.0` is no whole number, `1` no boolean. Paths are relative to the
working directory of the command; a leading `~` is your home.

Keys derived from other keys (`parallel.dp = "auto"`, the schedule, `decay_steps`) are resolved for the number of
processes: the job's under torchrun or srun, otherwise the fewest for the layout, or `--gpus`. A run stores the resolved
configuration as `config.toml` in its folder; train from this file to repeat the run.
"""

INJECTION = f"""\
## Injected faults

Set `fault.inject` to test a job's recovery: faults separated by semicolons. A fault strikes once over all restarts of
the run.

```
kill rank=2 step=5; stop rank=1 step=9 phase=grad_reduce for_s=3
random mtbf_s=30 seed=1 kinds=kill,stop,hang
```

- `step` counts from 1. Phases: {", ".join(PHASES)}. `build` and `load` come before the first step and have no step.
  Faults of the phase `write` strike the process that writes checkpoints.
- `for_s` is a length in seconds (default: to the end); `times=2` lets a fault strike in two attempts.
- `random` draws kinds of faults of ranks, ranks and phases with a seed, at a mean time of `mtbf_s` seconds or
  `mtbf_steps` steps, at least `apart` apart. Faults due while the job is down are left out.
- `flip_weight` and `flip_gradient` flip bit `bit` of one value of the rank's own shard.
- Use `python tools/lab faults` for faults of nodes, links and the driver: a run's own configuration refuses them, and
  faults of ranks and steps outside the run.
- Read `RUN/injected.jsonl` for a line per fault, written just before the fault.
"""

PRESET_INTRODUCTION = """\
# Presets

Name an architecture in `[model]`, and override single keys where yours differs:

```toml
[model]
preset = "llama3-8b"
seq_length = 4096
```

Run `megascale check CONFIG --show` to see the resulting section. Take the sizes of published weights from their
`config.json` with `megascale ckpt model` ([models](models.md)).
"""


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is out of date")
    options = parser.parse_args()
    old = []
    for name, text in pages().items():
        path = DOCS / name
        if not options.check:
            write_text(path, text)
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            old.append(name)
            print(f"docs/{name} is out of date  -> make docs", file=sys.stderr)
    return int(bool(old))


def pages() -> dict[str, str]:
    """Return the texts of the generated pages, by file name."""
    return {
        "configuration.md": configuration(), "presets.md": presets(), "recipes.md": recipes.page(),
        "from-megatron.md": migration.page(),
    }  # fmt: skip


def configuration() -> str:
    """Return the page of all keys."""
    keys = top_keys() + [line for name, section in sections().items() for line in section_part(name, section)]
    parts = [INTRODUCTION, "## Keys\n", generated("keys", keys), INJECTION, generated("faults", injected_faults())]
    return "\n".join(parts)


def generated(name: str, lines: list[str]) -> str:
    """Enclose lines in the marks of a generated region, which no bound of words counts."""
    return "\n".join([f"<!-- {name}: begin -->", *lines, f"<!-- {name}: end -->", ""])


def top_keys() -> list[str]:
    """Tabulate the keys outside sections."""
    rows = [
        ["`name`", "text", "required", "names the run's folder; letters, digits, `.`, `_` and `-`"],
        ["`output_dir`", "text", '`"runs"`', "parent of the run's folder, `output_dir`/`name`"],
        ["`extends`", "text", "none", "a base file, which this file overrides and extends"],
    ]
    return rendered(["key", "values", "default", "meaning"], rows)


def section_part(name: str, section: type[Section]) -> list[str]:
    """Return the heading, keys and choices of a section."""
    rows, choices = [], []
    for attribute, field in section.model_fields.items():
        key = field.alias or attribute
        choice = choice_of(field)
        default = (
            f"follows `{DERIVED_FROM[key]}`" if section is ModelConfig and key in DERIVED_FROM else shown_default(field)
        )
        rows.append([f"`{key}`", " or ".join(values_in_words(field)), default, field.description or ""])
        if choice:
            choices += [[f"`{key}`", f"`{name}`", "the best available backend"] for name in choice.also]
            choices += [[f"`{key}`", f"`{card.name}`", card.help] for card in choice.registry.cards.values()]
    first, _, rest = inspect.cleandoc(section.__doc__ or "").partition(": ")
    lines = [f"### {first.strip('`')}\n", *([f"{rest[:1].upper()}{rest[1:]}\n"] if rest else [])]
    lines += rendered(["key", "values", "default", "meaning"], rows)
    if choices:
        lines += rendered(["key", "choice", "what it is"], choices)
    return lines


def injected_faults() -> list[str]:
    """Tabulate the kinds of `fault.inject`."""
    rows = []
    for name, kind in KINDS.items():
        target = [f"`{kind.target}=N`"] if kind.target != "driver" else []
        keys = [*target, "`step=N`", *(f"`{key}=`" for key in kind.required), *(f"[`{key}=`]" for key in kind.options)]
        phases = "any" if kind.phases == PHASES else ", ".join(kind.phases)
        rows.append([f"`{name}`", kind.help, " ".join(keys), f"{phases} ({kind.phase})" if phases else ""])
    return rendered(["kind", "what it does", "keys", "phases (default)"], rows)


def shown_default(field: FieldInfo) -> str:
    """Format the default as TOML."""
    if field.is_required():
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def presets() -> str:
    """Return the page of all presets."""
    rows = []
    for name in PRESETS:
        model = ModelConfig.model_validate({"preset": name})
        sizes = (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.ffn_size)
        parts = ", ".join([model.norm, model.activation, model.position])
        shown = [f"{size:,}" for size in (*sizes, model.vocab_size, model.seq_length)]
        rows.append([f"`{name}`", format_count(parameter_count(model)), *shown, parts])
    head = ["preset", "parameters", "layers", "hidden", "heads", "kv heads", "ffn", "vocabulary", "sequence", "parts"]
    return "\n".join([PRESET_INTRODUCTION, generated("presets", rendered(head, rows))])


def rendered(head: list[str], rows: list[list[str]]) -> list[str]:
    """Format a Markdown table, with a blank line at the end."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines), ""]


if __name__ == "__main__":
    sys.exit(main())
