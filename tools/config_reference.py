"""The tables of docs/configuration.md and docs/presets.md, from the types of the configuration and the catalog."""

from __future__ import annotations

import inspect
import json

from pydantic.fields import FieldInfo

from megascale.catalog.presets import PRESETS
from megascale.config.injection import KINDS, PHASES
from megascale.config.loading import sections
from megascale.config.model import DERIVED_FROM, ModelConfig
from megascale.config.section import Section
from megascale.config.value_words import choice_of, values_in_words
from megascale.core.units import format_count
from megascale.layout.parameters import active_parameter_count, parameter_count
from results import pipes

KEY_COLUMNS = ["key", "values", "default", "meaning"]


def keys() -> list[str]:
    """Tabulate all keys: those outside sections, then each section with its choices."""
    rows = [
        ["`name`", "text", "required", "names the run's folder; letters, digits, `.`, `_` and `-`"],
        ["`output_dir`", "text", '`"runs"`', "parent of the run's folder, `output_dir`/`name`"],
        ["`extends`", "text", "none", "a base file, which this file overrides and extends"],
    ]
    parts = (section_part(name, section) for name, section in sections().items())
    return [*pipes(KEY_COLUMNS, *rows), *(line for part in parts for line in ("", *part))]


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
    lines = [f"### {first.strip('`')}", "", *([f"{rest[:1].upper()}{rest[1:]}", ""] if rest else [])]
    lines += pipes(KEY_COLUMNS, *rows)
    return [*lines, "", *pipes(["key", "choice", "what it is"], *choices)] if choices else lines


def faults() -> list[str]:
    """Tabulate the kinds of `fault.inject`."""
    rows = []
    for name, kind in KINDS.items():
        target = [f"`{kind.target}=N`"] if kind.target != "driver" else []
        keys = [*target, "`step=N`", *(f"`{key}=`" for key in kind.required), *(f"[`{key}=`]" for key in kind.options)]
        phases = "any" if kind.phases == PHASES else ", ".join(kind.phases)
        rows.append([f"`{name}`", kind.help, " ".join(keys), f"{phases} ({kind.phase})" if phases else ""])
    return [f"Phases: {', '.join(PHASES)}.", "", *pipes(["kind", "what it does", "keys", "phases (default)"], *rows)]


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
        parts = ", ".join(
            [model.norm, model.activation, model.position, *["latent attention"] * (model.kv_lora_rank > 0)]
        )
        if model.experts:
            parts += f"; {model.experts} experts of {model.expert_ffn_size:,}, {model.experts_per_token} a token: "
            parts += f"{format_count(active_parameter_count(model))} active"
        shown = [f"{size:,}" for size in (*sizes, model.vocab_size, model.seq_length)]
        rows.append([f"`{name}`", format_count(parameter_count(model)), *shown, parts])
    head = ["preset", "parameters", "layers", "hidden", "heads", "kv heads", "ffn", "vocabulary", "sequence", "parts"]
    return pipes(head, *rows)
