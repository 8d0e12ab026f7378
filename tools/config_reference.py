#!/usr/bin/env python3
"""Write docs/configuration.md: every key from the types that check it, every choice from the catalog.

`--check` writes nothing and exits with status 1 if the page is not what this tool would write.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from megascale.account.parameters import parameter_count
from megascale.catalog.presets import PRESETS
from megascale.config.explain import sections
from megascale.config.model import FOLLOWS, ModelConfig
from megascale.config.section import Choice, Section
from megascale.core.units import format_count

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

This page is written by `tools/config_reference.py` (`make docs`) from the types that check a configuration.

A run is one TOML file. `megascale check run.toml` finds every mistake in it at once, each in one line with its place,
its key, what was found and how to mend it. It needs neither GPUs nor torch, starts nothing, and its exit status is 2
if there is a mistake. `megascale train` makes the same checks before any process starts.

```toml
name = "my-run"
extends = "base.toml"

[model]
preset = "llama3-8b"

[parallel]
tp = 2
sp = true
```

## How a value is found

1. **`extends`** names another file, counted from the folder of the file that says so. Its values are read first, and
   its own `extends` before them. Tables are joined key by key; any other value, a list too, replaces the one below
   it.
2. **The file itself.**
3. **The command line**: `megascale train run.toml model.num_layers=16 'data.train=[[0.7, "a"], [0.3, "b"]]'`. A value
   is written as in TOML; a word that is no TOML value is a string, `parallel.schedule=gpipe`, and so is anything but a
   list for a key that takes a text, `name=2026`.
4. **A preset** fills in the keys of `[model]` that are still missing.
5. **Defaults**, as in the tables below.

An unknown key is a mistake, wherever it stands. Types are strict: `4.0` is no whole number and `1` is no boolean.
Paths in a file count from the folder in which the command is started; `~` at their start is the home of the user.

What follows from other keys (`parallel.dp = "auto"`, the schedule, `decay_steps`) gets its value when the number of
processes is known. The number is that of torchrun or srun; outside them it is the smallest that the layout needs, and
`megascale check --gpus N` asks for another. `megascale check --show` prints the resolved configuration, with all keys
and absolute paths. A run keeps it as `config.toml` in its folder; it is a configuration too, and gives the same run.
"""

# What the flags of Megatron-LM are called here; a key without a value takes the flag's.
MEGATRON: list[tuple[str, str, str]] = [
    ("--num-layers", "model.num_layers", ""),
    ("--hidden-size", "model.hidden_size", ""),
    ("--num-attention-heads", "model.num_heads", ""),
    ("--group-query-attention --num-query-groups", "model.num_kv_heads", ""),
    ("--ffn-hidden-size", "model.ffn_size", "for swiglu the width of one of the two matrices, as there"),
    ("--vocab-size", "model.vocab_size", "true size; each of tp ranks pads to a multiple of 64"),
    ("--seq-length, --max-position-embeddings", "model.seq_length", "both"),
    ("--normalization", "model.norm", ""),
    ("--norm-epsilon", "model.norm_eps", ""),
    ("--swiglu", "model.activation", '`"swiglu"`'),
    ("--position-embedding-type", "model.position", "`learned_absolute` is `learned`"),
    ("--rotary-base", "model.rope_theta", ""),
    ("--disable-bias-linear", "model.bias", "`false`"),
    ("--untie-embeddings-and-output-weights", "model.tie_embeddings", "`false`"),
    ("--hidden-dropout, --attention-dropout", "model.dropout", "one value for both; 0 by default, not 0.1"),
    ("--init-method-std", "model.init_std", ""),
    ("--tensor-model-parallel-size", "parallel.tp", ""),
    ("--sequence-parallel", "parallel.sp", "`true`"),
    ("--pipeline-model-parallel-size", "parallel.pp", ""),
    ("--num-virtual-stages-per-pipeline-rank", "parallel.vpp", ""),
    ("--num-layers-per-virtual-pipeline-stage", "parallel.vpp", "counts chunks: num_layers / (pp x layers of a chunk)"),
    ("--context-parallel-size", "parallel.cp", ""),
    ("--expert-model-parallel-size", "parallel.ep", ""),
    ("--use-distributed-optimizer", "parallel.zero", "`1`, which is the default"),
    ("--overlap-grad-reduce, --overlap-param-gather", "overlap.dp", "one switch, on by default"),
    ("--no-async-tensor-model-parallel-allreduce", "overlap.tp", "`false`"),
    ("--no-overlap-p2p-communication", "overlap.pp", "`false`"),
    ("--micro-batch-size", "batch.micro", ""),
    ("--global-batch-size", "batch.global", ""),
    ("--train-iters", "train.steps", ""),
    ("--seed", "train.seed", ""),
    ("--bf16", "train.precision", '`"bf16"`'),
    ("--recompute-granularity", "train.recompute", ""),
    ("--recompute-modules", "train.recompute_ops", '`core_attn` is `"attention"`, `layernorm` is `"norm"`'),
    ("--recompute-num-layers, --recompute-method", "train.recompute_chunks", "by model chunk, not by layer"),
    ("--log-interval", "train.log_every", ""),
    ("--eval-interval", "train.eval_every", "0, the default, is never"),
    ("--eval-iters", "train.eval_steps", ""),
    ("--optimizer", "optimizer.name", "`adam` is `adamw`"),
    ("--lr", "optimizer.lr", ""),
    ("--min-lr", "optimizer.min_lr", ""),
    ("--lr-warmup-iters", "optimizer.warmup_steps", ""),
    ("--lr-decay-style", "optimizer.decay", "`WSD` is `wsd`; always until `train.steps`"),
    ("--lr-wsd-decay-iters", "optimizer.decay_steps", ""),
    ("--weight-decay", "optimizer.weight_decay", "0.1 by default, not 0.01"),
    ("--adam-beta1, --adam-beta2", "optimizer.betas", "0.95 by default for the second, not 0.999"),
    ("--adam-eps", "optimizer.eps", ""),
    ("--clip-grad", "optimizer.clip_norm", ""),
    ("--data-path, --train-data-path", "data.train", "the same files: `.bin` and `.idx`"),
    ("--valid-data-path", "data.valid", ""),
    ("--split", "data.split", "two shares: training and validation"),
    ("--tokenizer-model", "data.tokenizer", ""),
    ("--data-cache-path", "data.cache", ""),
    ("--mock-data", "data.mock", "`true`"),
    ("--save, --tensorboard-dir", "observe.dir", "a run has one folder for all of it"),
    ("--save-interval", "checkpoint.every", ""),
    ("--load", "checkpoint.resume", "`auto` goes on with the run's own newest checkpoint"),
]


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the page is out of date")
    options = parser.parse_args()
    text = page()
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        print(f"docs/{PAGE.name} is out of date  -> make docs", file=sys.stderr)
        return 1
    return 0


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, "## Keys\n", *top_keys()]
    for name, section in sections().items():
        parts += section_part(name, section)
    return "\n".join([*parts, *presets(), *megatron()])


def top_keys() -> list[str]:
    """The keys above the first table."""
    rows = [
        [
            "`name`",
            "text",
            "required",
            "names the run's folder, `observe.dir`/`name`; letters, digits, `.`, `_` and `-`",
        ],
        ["`extends`", "text", "none", "a file whose values this one changes and adds to"],
    ]
    return rendered(["key", "values", "default", "meaning"], rows)


def section_part(name: str, section: type[Section]) -> list[str]:
    """The heading, keys and choices of a section."""
    rows, choices = [], []
    for attribute, field in section.model_fields.items():
        key = field.alias or attribute
        found = registry_of(field)
        default = f"follows `{FOLLOWS[key]}`" if section is ModelConfig and key in FOLLOWS else shown_default(field)
        rows.append([f"`{key}`", " or ".join(values(field)), default, field.description or ""])
        if found:
            choices += [[f"`{key}`", f"`{name}`", "the best that is present and can serve"] for name in found.also]
            choices += [[f"`{key}`", f"`{card.name}`", card.help] for card in found.registry.cards.values()]
    first, _, rest = (section.__doc__ or "").partition(": ")
    lines = [f"### {first.strip('`')}\n", *([f"{rest[:1].upper()}{rest[1:]}\n"] if rest else [])]
    lines += rendered(["key", "values", "default", "meaning"], rows)
    if choices:
        lines += rendered(["key", "choice", "what it is"], choices)
    return lines


def registry_of(field: FieldInfo) -> Choice | None:
    """What a field chooses from."""
    parts = [*field.metadata, *(each for arm in get_args(field.annotation) for each in get_args(arm))]
    checks = (part.func for part in parts if isinstance(part, AfterValidator))
    return next((check for check in checks if isinstance(check, Choice)), None)


def values(field: FieldInfo) -> list[str]:
    """What may be written for a key."""
    return list(dict.fromkeys(described(field.annotation, field.metadata)))


def described(annotation: Any, bounds: Iterable[Any] = ()) -> Iterator[str]:
    """A type, and what limits it, in words; several for a union."""
    bounds = [inner for bound in bounds for inner in (getattr(bound, "metadata", None) or [bound])]
    origin, arguments = get_origin(annotation), get_args(annotation)
    words = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
    if any(isinstance(getattr(bound, "func", None), Choice) for bound in bounds):
        yield "a choice, below"
    elif annotation in words:
        yield words[annotation] + limits(bounds)
    elif origin is Literal:
        yield from (f"`{json.dumps(argument)}`" for argument in arguments)
    elif hasattr(annotation, "__metadata__"):
        yield from described(arguments[0], annotation.__metadata__)
    elif origin is list:
        yield f"list of {' or '.join(described(arguments[0]))}"
    elif origin is tuple:
        yield f"[{', '.join(' or '.join(described(argument)) for argument in arguments)}]"
    elif annotation in (None, NoneType):
        yield from ()
    else:
        for argument in arguments:
            yield from described(argument)


def limits(bounds: Iterable[Any]) -> str:
    """The bounds of a number that a reader may meet."""
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}
    found = [(word, getattr(bound, name, None)) for bound in bounds for name, word in words.items()]
    said = [f"{word} {value}" for word, value in found if value is not None and value < 2**40]
    return f" {', '.join(said)}" if said else ""


def shown_default(field: FieldInfo) -> str:
    """The default as TOML writes it."""
    if field.is_required():
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def presets() -> list[str]:
    """The table of presets."""
    rows = []
    for name in PRESETS:
        model = ModelConfig.model_validate({"preset": name})
        sizes = (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.ffn_size)
        parts = ", ".join([model.norm, model.activation, model.position])
        shown = [f"{size:,}" for size in (*sizes, model.vocab_size, model.seq_length)]
        rows.append([f"`{name}`", format_count(parameter_count(model)), *shown, parts])
    head = ["preset", "parameters", "layers", "hidden", "heads", "kv heads", "ffn", "vocabulary", "sequence", "parts"]
    return ["## Presets\n", "Keys beside `model.preset` win over it.\n", *rendered(head, rows)]


def megatron() -> list[str]:
    """The table for those who come from Megatron-LM."""
    rows = [[", ".join(f"`{flag}`" for flag in flags.split(", ")), f"`{key}`", note] for flags, key, note in MEGATRON]
    return ["## From Megatron-LM\n", *rendered(["Megatron-LM", "here", "note"], rows)]


def rendered(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table and the blank line after it."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines), ""]


if __name__ == "__main__":
    sys.exit(main())
