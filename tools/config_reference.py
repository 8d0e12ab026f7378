#!/usr/bin/env python3
"""Write docs/configuration.md: keys from the types of the configuration, choices from the catalog.

`--check` writes nothing, and exits with status 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from megascale.catalog.presets import PRESETS
from megascale.config.injection import KINDS, PHASES
from megascale.config.loading import sections
from megascale.config.model import DERIVED_FROM, ModelConfig
from megascale.config.section import Choice, Section
from megascale.core.units import format_count
from megascale.layout.parameters import parameter_count

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

`tools/config_reference.py` (`make docs`) writes this page from the types that check a configuration.

A run is one TOML file. `megascale check run.toml` lists every mistake of the file, one line per mistake: place, key,
problem and hint. The command needs neither GPUs nor torch, starts nothing, and exits with status 2 if there is a
mistake. `megascale train` makes the same checks before it starts a process.

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

Later sources override earlier ones:

1. **Defaults**, in the tables below.
2. **A preset** sets keys of `[model]`.
3. **`extends`** names a base file, relative to the folder of the extending file. Tables are merged key by key; any
   other value, lists included, replaces the base file's.
4. **The file itself.**
5. **The command line**: `megascale train run.toml model.num_layers=16 'data.train=[[0.7, "a"], [0.3, "b"]]'`. Values
   are written as in TOML. A word that is not TOML is a string (`parallel.schedule=gpipe`); for a key of type text,
   anything but a list is a string (`name=2026`).

An unknown key is a mistake. Types are strict: `4.0` is not a whole number, and `1` is not a boolean. Paths in a file
are relative to the working directory of the command; a leading `~` is the user's home.

Keys derived from other keys (`parallel.dp = "auto"`, the schedule, `decay_steps`) are resolved for the number of
processes: under torchrun or srun the job's, otherwise the fewest that the layout needs (`megascale check --gpus N` sets
another number). `megascale check --show` prints the resolved configuration with all keys and absolute paths. A run
stores the resolved configuration as `config.toml` in its folder; training from that file gives the same run.
"""

INJECTION = f"""\
#### Injected faults

`fault.inject` is a test of a job's recovery: faults, separated by semicolons, each of which strikes once over all
restarts of the run. `RUN/injected.jsonl` has a line for each, written just before. Without the key nothing is injected.

```
kill rank=2 step=5; stop rank=1 step=9 phase=grad_reduce for_s=3
random mtbf_s=30 seed=1 kinds=kill,stop,hang
```

- `step` counts from 1. Phases: {", ".join(PHASES)}. `build` and `load` come before the first step and have no step.
  Faults of the phase `write` strike the process that writes checkpoints.
- `for_s` is a length in seconds (without: to the end), `times=2` lets a fault strike in two attempts.
- `random` draws kinds of faults of ranks, ranks and phases with a seed, at a mean time `mtbf_s` in seconds or
  `mtbf_steps` in steps; `apart` is the least time between two. Those due while the job is down are left out.
- `flip_weight` and `flip_gradient` flip bit `bit` of one value of the rank's own shard.
- Ranks inject their own faults. Those of nodes, links and the driver are for the program that runs the test:
  `python tools/lab faults`, with links on the hosts of a testbed.
- Refused are faults of nodes, links and the driver in a run's own configuration, and faults of ranks and steps that the
  run does not have: they would inject nothing.
"""

# Megatron-LM's flags and their keys; without a note the key takes the flag's value
MEGATRON: list[tuple[str, str, str]] = [
    ("--num-layers", "model.num_layers", ""),
    ("--hidden-size", "model.hidden_size", ""),
    ("--num-attention-heads", "model.num_heads", ""),
    ("--group-query-attention --num-query-groups", "model.num_kv_heads", ""),
    ("--ffn-hidden-size", "model.ffn_size", "for swiglu the width of one of the two matrices"),
    ("--vocab-size", "model.vocab_size", "true size; each of tp ranks pads to a multiple of 64"),
    ("--seq-length, --max-position-embeddings", "model.seq_length", "both"),
    ("--normalization", "model.norm", ""),
    ("--norm-epsilon", "model.norm_eps", ""),
    ("--swiglu", "model.activation", '`"swiglu"`'),
    ("--position-embedding-type", "model.position", "`learned_absolute` is `learned`"),
    ("--rotary-base", "model.rope_theta", ""),
    ("--rotary-percent", "model.rotary_fraction", ""),
    ("--use-rope-scaling, --rope-scaling-factor", "model.rope_scaling", "a table; llama3 with all its keys"),
    ("--kv-channels", "model.head_dim", ""),
    ("--add-qkv-bias", "model.qkv_bias", "`true`"),
    ("--qk-layernorm", "model.qk_norm", '`"head"`'),
    ("--softmax-scale", "model.softmax_scale", ""),
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
    ("--recompute-num-layers, --recompute-method", "train.recompute_model_chunks", "by model chunk, not by layer"),
    ("--cpu-offloading", "train.activation_offload", '`true`, with `recompute = "full"`'),
    ("--log-interval", "train.log_every", ""),
    ("--eval-interval", "train.eval_every", "0, the default, is never"),
    ("--eval-iters", "train.eval_steps", ""),
    (
        "--check-weight-hash-across-dp-replicas-interval",
        "train.check_replicas_every",
        "over tp and tied embeddings, too",
    ),
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
    ("--save, --tensorboard-dir", "output_dir", "a run has one folder for all of it"),
    ("--save-interval", "checkpoint.every", ""),
    ("--load", "checkpoint.resume", "`auto` resumes from the run's newest checkpoint"),
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
    """Return the text of the page."""
    parts = [INTRODUCTION, "## Keys\n", *top_keys()]
    for name, section in sections().items():
        parts += section_part(name, section)
        if name == "fault":
            parts += injected_faults()
    return "\n".join([*parts, *presets(), *megatron()])


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
        choice = registry_of(field)
        default = (
            f"follows `{DERIVED_FROM[key]}`" if section is ModelConfig and key in DERIVED_FROM else shown_default(field)
        )
        rows.append([f"`{key}`", " or ".join(values(field)), default, field.description or ""])
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
    return [INJECTION, *rendered(["kind", "what it does", "keys", "phases (default)"], rows)]


def registry_of(field: FieldInfo) -> Choice | None:
    """Return the registry of a field's choices, or None."""
    parts = [*field.metadata, *(part for arm in get_args(field.annotation) for part in get_args(arm))]
    checks = (part.func for part in parts if isinstance(part, AfterValidator))
    return next((check for check in checks if isinstance(check, Choice)), None)


def values(field: FieldInfo) -> list[str]:
    """List the allowed values of a key in words."""
    return list(dict.fromkeys(described(field.annotation, field.metadata)))


def described(annotation: Any, bounds: Iterable[Any] = ()) -> Iterator[str]:
    """Yield a type and its bounds in words; several for a union."""
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
    """Format the bounds of a number, apart from very large bounds."""
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}
    bounded = [(word, getattr(bound, name, None)) for bound in bounds for name, word in words.items()]
    parts = [f"{word} {value}" for word, value in bounded if value is not None and value < 2**40]
    return f" {', '.join(parts)}" if parts else ""


def shown_default(field: FieldInfo) -> str:
    """Format the default as TOML."""
    if field.is_required():
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def presets() -> list[str]:
    """Tabulate the presets."""
    rows = []
    for name in PRESETS:
        model = ModelConfig.model_validate({"preset": name})
        sizes = (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.ffn_size)
        parts = ", ".join([model.norm, model.activation, model.position])
        shown = [f"{size:,}" for size in (*sizes, model.vocab_size, model.seq_length)]
        rows.append([f"`{name}`", format_count(parameter_count(model)), *shown, parts])
    head = ["preset", "parameters", "layers", "hidden", "heads", "kv heads", "ffn", "vocabulary", "sequence", "parts"]
    return ["## Presets\n", "Keys of `[model]` override the preset's.\n", *rendered(head, rows)]


def megatron() -> list[str]:
    """Tabulate Megatron-LM's flags."""
    rows = [[", ".join(f"`{flag}`" for flag in flags.split(", ")), f"`{key}`", note] for flags, key, note in MEGATRON]
    return ["## From Megatron-LM\n", *rendered(["Megatron-LM", "here", "note"], rows)]


def rendered(head: list[str], rows: list[list[str]]) -> list[str]:
    """Format a Markdown table, with a blank line at the end."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines), ""]


if __name__ == "__main__":
    sys.exit(main())
