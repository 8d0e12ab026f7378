"""Growth of a model in width and depth that keeps its function (`ModelGrowth`).

    hidden_size x k    tensors that write the residual stream have every row k times; readers have W / k + R_i
                       for copy i, with random R_i of sum 0, by which the gradients of copies differ
                       (LEMON, Wang et al. 2024). Norms see k equal copies: the mean square and epsilon are unchanged
    heads, MLP width   new rows are random; the columns for them are zero (Net2Net, Chen et al. 2016)
    num_layers         new layers, between or after the others, are random but for their last projections, or the gains
                       of the norms after a branch, which are zero

A tied head reads k copies of each column: the gain of the final norm is divided by k. Gradients of a tensor that writes
the residual stream are 1 / k of the old ones, and so are first moments; second moments 1 / k^2. New
elements have no moments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megascale.catalog.layers import NORMS
from megascale.config.attention_pattern import has_states
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.core.errors import CheckpointError, ConfigError, Problem
from megascale.layout.parameters import all_params
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import Coord, Topology
from megascale.model.initialize import init_parameters

SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "expert_ffn_size", "shared_ffn_size")
"""The keys of `[model]` that may grow."""

FREE = ("preset", "seq_length", "dropout", "init_std", "mup_base_width", "window", "exits")
"""The keys without an effect on the function, and those compared layer by layer."""

IN, OUT, QUERIES, KEYS, OTHER = "in", "out", "queries", "keys", "other"
"""Roles of a dimension: input from or output to the residual stream; rows of heads; any other."""

ROLES = {
    "embedding.token": (OTHER, OUT), "embedding.position": (OTHER, OUT), "head": (OTHER, IN),
    "attention.q": (QUERIES, IN), "attention.k": (KEYS, IN), "attention.v": (KEYS, IN), "attention.out": (OUT, QUERIES),
    "attention.sinks": (QUERIES,), "attention.gate": (QUERIES, IN), "attention.norm": (OTHER,),
    "attention.q_norm": (OTHER,), "attention.k_norm": (OTHER,),
    "attention.q_latent": (OTHER, IN), "attention.kv_latent": (OTHER, IN), "attention.k_rope": (OTHER, IN),
    "attention.q_rope": (QUERIES, IN), "attention.q_latent_norm": (OTHER,), "attention.kv_latent_norm": (OTHER,),
    "mlp.gate": (OTHER, IN), "mlp.up": (OTHER, IN), "mlp.down": (OUT, OTHER),
    "shared.gate": (OTHER, IN), "shared.up": (OTHER, IN), "shared.down": (OUT, OTHER), "shared_gate": (OTHER, IN),
    "experts.gate_up": (OTHER, OTHER, OTHER, IN), "experts.up": (OTHER, OTHER, IN),
    "experts.down": (OTHER, OUT, OTHER), "router": (OTHER, IN), "merge": (OTHER, OTHER),
}  # fmt: skip
"""Roles of the dimensions of a weight by the name of its module; its bias has those of its outputs."""

OBSTACLES: tuple[tuple[str, Callable[[ModelConfig], object], str], ...] = (
    ("num_layers", lambda m: m.residual_tau, "a layer that adds nothing scales the residual stream"),
    ("num_layers", lambda m: has_states(m.attention_pattern), "decays of linear attention follow the number of layers"),
    ("num_heads", lambda m: has_states(m.attention_pattern), "decays of linear attention follow the number of heads"),
    ("num_heads", lambda m: m.sparse_attention, "the blocks that a head sees follow its number"),
    ("num_heads", lambda m: m.kv_lora_rank, "heads of latent attention do not grow"),
    ("num_heads", lambda m: m.qk_norm == "full", "the norm's mean is over all heads, also new ones"),
    ("hidden_size", lambda m: m.mtp_layers, "depths of prediction: their merge reads two vectors of the width"),
)
"""Keys that cannot grow in some models, and why."""

NUMBERED = re.compile(r"(layers|exits)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class ModelGrowth:
    """The growth of a model to another model, accepted by `plan_growth`. `olds`: the number of each layer before, None
    for new ones; `seed`: of new weights.
    """

    model: ModelConfig
    to: ModelConfig
    olds: tuple[int | None, ...]
    seed: int

    @property
    def copies(self) -> int:
        """The copies of an element of the residual stream."""
        return self.to.hidden_size // self.model.hidden_size

    @cached_property
    def tensors(self) -> dict[str, tuple[ParamSpec, TensorSpec]]:
        """The tensors of the grown model by name, with their parameters."""
        return {tensor.name: (param, tensor) for param in all_params(self.to) for tensor in param.parts}

    def source(self, name: str) -> str | None:
        """Return the name of a tensor of the grown model before; None in a new layer."""
        if (found := NUMBERED.fullmatch(name)) is None:
            return name
        behind = found[1] == "exits"  # an exit has the number of the layer that follows it
        old = self.olds[int(found[2]) - behind]
        return None if old is None else f"{found[1]}.{old + behind}.{found[3]}"

    def weight(self, name: str, old: Tensor | None) -> Tensor:
        """Return a weight of the grown model, f64; `old`: before."""
        param, tensor = self.tensors[name]
        drawn, roles = torch.empty(tensor.shape), self._roles(name)
        init_parameters([(drawn, ParamSpec(name, (tensor,), param.kind))], Topology(), Coord(), self.seed)
        drawn = drawn.double()
        if old is None:
            return drawn if (value := self._silent(name)) is None else torch.full_like(drawn, value)
        values = self._spread(name, old)
        if self._divides_logits(name):
            offset = self._offset(name)
            return (values + offset) / self.copies - offset
        if OUT in roles:
            return values
        if roles[-1] == IN and (copies := tensor.shape[-1] // old.shape[-1]) > 1:
            noise = drawn.unflatten(-1, (copies, -1))
            values = values / copies + (noise - noise.mean(-2, keepdim=True)).flatten(-2)
        return torch.where(self._spread(name, torch.ones_like(old)) > 0, values, drawn)

    def moment(self, name: str, old: Tensor | None, power: int) -> Tensor:
        """Return a moment of the gradient to a `power`, f64; `old`: before."""
        if old is None:
            return torch.zeros(self.tensors[name][1].shape)
        shared = OUT in self._roles(name) and not self._divides_logits(name)
        return self._spread(name, old) / (self.copies**power if shared else 1)

    def _roles(self, name: str) -> tuple[str, ...]:
        """Return the roles of the dimensions of a tensor. Raises: CheckpointError for a tensor without a rule"""
        found, dims = NUMBERED.fullmatch(name), len(self.tensors[name][1].shape)
        module = (found[3] if found else name).removesuffix(".weight").removesuffix(".bias")
        if module not in ROLES and not module.endswith("norm"):
            what = f"{name}: there is no rule by which this tensor grows"
            raise CheckpointError(what, hint="a model.block among those of docs/configuration.md")
        return ROLES.get(module, (OUT,))[:dims]

    def _divides_logits(self, name: str) -> bool:
        """True for the final norm before a tied head, whose weights for all copies are the same."""
        return self.to.tie_embeddings and name.startswith("final_norm.")

    def _offset(self, name: str) -> float:
        """Return what a norm adds to its gain; 0 for its bias."""
        return float(NORMS[self.to.norm].facts["offset"]) if name.endswith("weight") else 0.0

    def _silent(self, name: str) -> float | None:
        """Return the value of the tensors that make a new layer add nothing; None for other tensors."""
        if any("_post_norm." in each for each in self.tensors):
            return -self._offset(name) if "_post_norm." in name else None
        return 0.0 if OUT in self._roles(name) and "norm." not in name else None

    def _spread(self, name: str, old: Tensor) -> Tensor:
        """Return the elements of a tensor at their new places, copies included, with zeros for new elements. Heads stay
        with their key-value head.
        """
        shape, values = self.tensors[name][1].shape, old.double()
        for dim, role in enumerate(self._roles(name)):
            if role in (IN, OUT):
                values = torch.cat([values] * (shape[dim] // old.shape[dim]), dim)
                continue
            sizes = _sizes(self.to, role, shape[dim])
            values = values.unflatten(dim, _sizes(self.model, role, old.shape[dim]))
            grown = values.new_zeros(*values.shape[:dim], *sizes, *values.shape[dim + len(sizes) :])
            grown[tuple(map(slice, values.shape))] = values
            values = grown.flatten(dim, dim + len(sizes) - 1)
        return values


def _sizes(model: ModelConfig, role: str, size: int) -> tuple[int, ...]:
    """Return the sizes by which elements along a dimension are counted: key-value heads, heads of each, rows."""
    keys, queries = model.num_kv_heads, model.num_heads
    if role == QUERIES:
        return keys, queries // keys, size // queries
    return (keys, size // keys) if role == KEYS else (size,)


def plan_growth(model: ModelConfig, to: ModelConfig, seed: int, where: str) -> ModelGrowth:
    """Return the growth of a model to another model, of the file `where`.

    Raises: ConfigError if no growth of the kinds above keeps the function
    """
    findings = [*_obstacles(model, to)]
    places = () if findings else _places(model, to)
    if not findings and not places:
        message = f"the windows, experts or exits of the {model.num_layers} layers would change, apart or first"
        findings = [Finding("model.num_layers", message, "a multiple, with model.window and model.exits in step")]
    if findings:
        raise ConfigError(
            [Problem(where, each.key, f"{each.message}: the function would change", each.hint) for each in findings]
        )
    olds = {place: layer for layer, place in enumerate(places)}
    depths = range(model.num_layers, model.total_layers)  # layers of multi-token prediction stay last
    return ModelGrowth(model, to, (*map(olds.get, range(to.num_layers)), *depths), seed)


def _obstacles(model: ModelConfig, to: ModelConfig) -> Iterator[Finding]:
    """Yield the keys that change the function, the sizes that shrink, and other obstacles to an exact growth."""
    for key in (field.alias or name for name, field in ModelConfig.model_fields.items() if name not in FREE):
        old, new = (each.position_rows if key == "positions" else getattr(each, key) for each in (model, to))
        if key in SIZES and new < old:
            yield Finding(f"model.{key}", f"{new} is less than the checkpoint's {old}", f"{old} or more")
        elif key not in SIZES and old != new:
            yield Finding(f"model.{key}", f"{new} here, {old} in the checkpoint", f"{key} = {old}")
    if all(getattr(model, key) == getattr(to, key) for key in SIZES):
        yield Finding("model", "no size is larger than the checkpoint's", f"a larger {', '.join(SIZES)}")
    if to.unit_scaling:
        yield Finding("model.unit_scaling", "its factors follow the sizes", "a model without it")
    if to.hidden_size % model.hidden_size:
        multiple = f"multiple of {model.hidden_size}"
        yield Finding(
            "model.hidden_size", f"elements are copied, and {to.hidden_size} is no {multiple}", f"a {multiple}"
        )
    shared, sharing = to.num_heads // to.num_kv_heads, model.num_heads // model.num_kv_heads
    if shared < sharing:
        yield Finding("model.num_kv_heads", f"{sharing} heads share a key-value head, and {shared} would", "fewer")
    for key, holds, reason in OBSTACLES:
        if getattr(to, key) != getattr(model, key) and holds(to):
            yield Finding(f"model.{key}", reason, f"{key} = {getattr(model, key)}")


def _places(model: ModelConfig, to: ModelConfig) -> tuple[int, ...]:
    """Return the new places of layers, evenly among new layers or before them, with the same windows, experts and
    exits; empty without such places.
    """
    old, new, before, after = model.num_layers, to.num_layers, _layers(model), _layers(to)
    for places in (tuple(layer * new // old for layer in range(old)), tuple(range(old))):
        exits = [places[layers - 1] + 1 for layers in model.exits]
        if [after[place] for place in places] == before and exits == to.exits:
            return places
    return ()


def _layers(model: ModelConfig) -> list[tuple[int, bool]]:
    """List the layers' windows, and whether they have experts."""
    return [(model.given_window(layer), model.has_experts(layer)) for layer in range(model.num_layers)]
