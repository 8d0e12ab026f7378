"""The description of a family: keys of config.json and `[model]`, and names of tensors, both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale.config.model import ModelConfig

ConfigKeys = dict[str, Any]

REQUIRED = object()


@dataclass(frozen=True)
class Key:
    """A key of config.json with the value of a `[model]` key. `default`: for a missing key, a value or the name of
    another key of config.json as `Same`; `null`: likewise for null, if not None. `size`: the value must be above 0.
    `also`: another name of the key in files.
    """

    name: str
    default: Any = REQUIRED
    size: bool = False
    null: Any = None
    also: str = ""


@dataclass(frozen=True)
class Same:
    """A default: the value of another key of config.json."""

    name: str


@dataclass(frozen=True)
class Fused:
    """A tensor of Hugging Face that stacks those of `parts` that the model has along its outputs; `transposed`: stored
    [in, out]; `per_head`: the parts alternate by key-value head, with all queries of each; `paired`: parts whose rows
    (of a head) are pairs to rotate, which are neighbours in Hugging Face and halves apart here. `beside`: a module of
    layers that have the tensor, whatever others it replaces.
    """

    parts: tuple[str, ...]
    transposed: bool = False
    per_head: bool = False
    paired: tuple[str, ...] = ()
    beside: str = ""


@dataclass(frozen=True)
class Stacked:
    """A tensor of Hugging Face with the matrices [in, out] of all experts, of module `name`, whose biases are in a
    tensor of the name with `_bias`. Where an expert has several matrices, their outputs alternate.
    """

    name: str


Layer = dict[str, str | Fused]
"""Module of a layer in Hugging Face -> module of `layers.N`, or several."""


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture. `name`: its `model_type`.

    `fixed`: `[model]` keys with one value in all models of the family. `keys`: `[model]` key -> key of config.json.
    `required`: key of config.json -> supported values, of which the first is the default. `read`: functions to further
    `[model]` keys of a config.json; `write`: to further keys of a config.json.
    `outer`: megascale tensor -> Hugging Face tensor. `layer`: of `layer_prefix`.N. `experts`: stack of matrices of
    `layers.N` -> modules of each expert in Hugging Face, in the order of the stack, with * for the expert's number, or
    one that holds them one after the other, or the tensor that is a stack itself.
    `balance_bias`: the tensor of `layer_prefix`.N that has the experts' biases. `ignored_suffixes`: of tensors in files
    that are no weights.
    """

    name: str
    architecture: str
    fixed: dict[str, Any]
    keys: Mapping[str, Key]
    outer: Mapping[str, str]
    layer_prefix: str
    layer: Layer
    required: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    read: Sequence[Callable[[ConfigKeys], ConfigKeys]] = ()
    write: Sequence[Callable[[ModelConfig], ConfigKeys]] = ()
    ignored_suffixes: tuple[str, ...] = ()
    experts: Mapping[str, tuple[str, ...] | Stacked] = field(default_factory=dict)
    balance_bias: str = ""

    def model_keys(self, config: ConfigKeys) -> ConfigKeys:
        """The keys of `[model]` for a config.json.

        Raises: ValueError for an unsupported setting, KeyError and TypeError for a malformed config.json
        """
        for key, allowed in self.required.items():
            require(config, key, *allowed)
        keys = dict(self.fixed) | {name: value(config, key) for name, key in self.keys.items()}
        for read in self.read:
            keys |= read(config)
        return keys

    def config_keys(self, model: ModelConfig) -> ConfigKeys:
        """The keys of config.json for a model. What the family cannot express is lost."""
        config = {key: allowed[0] for key, allowed in self.required.items()}
        config |= {key.name: getattr(model, name) for name, key in self.keys.items()}
        for write in self.write:
            config |= write(model)
        return config


def value(config: ConfigKeys, key: Key) -> Any:
    """The value of a key, or its default.

    Raises: KeyError for a missing key without a default, ValueError for a size that is not above 0
    """
    found = config.get(key.name, config.get(key.also))
    if found is None:
        default = key.null if key.null is not None and key.name in config else key.default
        if default is REQUIRED:
            raise KeyError(key.name)
        return config[default.name] if isinstance(default, Same) else default
    if key.size and isinstance(found, int | float) and found <= 0:
        raise SizeError(f"{key.name} is {found!r}, not above 0")
    return found


class SizeError(ValueError):
    """A size in a config.json is not above 0."""


def require(config: ConfigKeys, key: str, *allowed: Any) -> None:
    """Check that a key is missing or has one of the `allowed` values. Raises: ValueError"""
    if config.get(key, allowed[0]) not in allowed:
        raise ValueError(f"{key} is {config[key]!r}, not {' or '.join(map(repr, allowed))}")
