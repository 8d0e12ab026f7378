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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megascale.catalog.layers import NORMS
from megascale.config.attention_pattern import has_states
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.sparse_pattern import Reach
from megascale.core.errors import CheckpointError, ConfigError, Problem
from megascale.layout.blocks import block_spec, surroundings
from megascale.layout.parameters import all_params
from megascale.layout.parts.elementwise import NormSpec
from megascale.layout.tensors import ParamSpec, TensorSpec, exit_name
from megascale.layout.topology import Coord, Topology
from megascale.model.initialize import init_parameters

SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "expert_ffn_size", "shared_ffn_size")
"""The keys of `[model]` that may grow."""

FREE = ("preset", "seq_length", "positions", "dropout", "init_std", "mup_base_width", "window", "exits")
"""The keys without an effect on the function, and those compared layer by layer."""

IN, OUT, QUERIES, KEYS, INNER, FIXED = "in", "out", "queries", "keys", "inner", "fixed"
"""Roles of a dimension: input from or output to the residual stream; rows of heads; the inside of an MLP; none."""

ROLES = {
    "embedding.token": (FIXED, OUT), "embedding.position": (FIXED, OUT), "head": (FIXED, IN),
    "attention.q": (QUERIES, IN), "attention.k": (KEYS, IN), "attention.v": (KEYS, IN), "attention.out": (OUT, QUERIES),
    "attention.sinks": (QUERIES,), "attention.q_norm": (FIXED,), "attention.k_norm": (FIXED,),
    "attention.gate": (QUERIES, IN), "attention.norm": (FIXED,),
    "mlp.gate": (INNER, IN), "mlp.up": (INNER, IN), "mlp.down": (OUT, INNER),
    "shared.gate": (INNER, IN), "shared.up": (INNER, IN), "shared.down": (OUT, INNER), "shared_gate": (FIXED, IN),
    "experts.gate_up": (FIXED, FIXED, INNER, IN), "experts.up": (FIXED, INNER, IN),
    "experts.down": (FIXED, OUT, INNER), "router": (FIXED, IN), "merge": (FIXED, FIXED),
}  # fmt: skip
"""Roles of the dimensions of a weight by the name of its module; its bias has those of its outputs."""

LATENT_ROLES = {
    "attention.q_latent": (FIXED, IN), "attention.kv_latent": (FIXED, IN), "attention.k_rope": (FIXED, IN),
    "attention.k": (FIXED, FIXED), "attention.v": (FIXED, FIXED), "attention.out": (OUT, FIXED),
    "attention.q_latent_norm": (FIXED,), "attention.kv_latent_norm": (FIXED,),
}  # fmt: skip

NUMBERED = re.compile(r"(layers|exits)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class ModelGrowth:
    """The growth of a model to another model, accepted by `plan_growth`. `layers`: the new places of the layers;
    `seed`: of new weights.
    """

    model: ModelConfig
    to: ModelConfig
    layers: tuple[int, ...]
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
        kind, number, rest = found[1], int(found[2]), found[3]
        if kind == "exits":
            return f"{exit_name(self.layers.index(number - 1) + 1)}.{rest}"
        layer = self.old_layer(number)
        return None if layer is None else f"layers.{layer}.{rest}"

    def old_layer(self, number: int) -> int | None:
        """Return the number of a layer before; None for a new layer. Layers of multi-token prediction stay last."""
        if number >= self.to.num_layers:
            return number - self.to.num_layers + self.model.num_layers
        return self.layers.index(number) if number in self.layers else None

    def weight(self, name: str, old: Tensor | None) -> Tensor:
        """Return a weight of the grown model, f64; `old`: before."""
        param, tensor = self.tensors[name]
        drawn, roles = self._draw(param, tensor), self.roles(name)
        if old is None:
            return drawn if (value := self._silent(name)) is None else torch.full_like(drawn, value)
        spread, is_new = self._spread(old, tensor, roles)
        if IN in roles and self.copies > 1:
            noise = drawn.unflatten(-1, (self.copies, -1))
            spread = spread / self.copies + (noise - noise.mean(-2, keepdim=True)).flatten(-2)
        if self._divides_logits(name):
            offset = float(NORMS[self.to.norm].facts["offset"]) if name.endswith("weight") else 0.0
            spread = (spread + offset) / self.copies - offset
        fresh = torch.zeros_like(drawn) if OUT in roles else drawn
        return torch.where(is_new, fresh, spread)

    def moment(self, name: str, old: Tensor, power: int) -> Tensor:
        """Return a moment of the gradient to a `power`, f64; `old`: before."""
        _, tensor = self.tensors[name]
        spread, is_new = self._spread(old, tensor, self.roles(name))
        if OUT in self.roles(name) and not self._divides_logits(name):
            spread = spread / self.copies**power
        return spread.masked_fill(is_new, 0.0)

    def roles(self, name: str) -> tuple[str, ...]:
        """Return the roles of the dimensions of a tensor. Raises: CheckpointError for a tensor without a rule"""
        found, dims = NUMBERED.fullmatch(name), len(self.tensors[name][1].shape)
        module = (found[3] if found else name).removesuffix(".weight").removesuffix(".bias")
        roles = (self._latent_roles if self.to.kv_lora_rank else ROLES).get(module)
        if roles is None and not module.endswith("norm"):
            what = f"{name}: there is no rule by which this tensor grows"
            raise CheckpointError(what, hint="a model.block among those of docs/configuration.md")
        return (roles or (OUT,))[:dims]

    @cached_property
    def _latent_roles(self) -> dict[str, tuple[str, ...]]:
        queries = (FIXED, FIXED if self.to.q_lora_rank else IN)
        return {**ROLES, **LATENT_ROLES, "attention.q": queries, "attention.q_rope": queries}

    def _divides_logits(self, name: str) -> bool:
        """True for the final norm before a tied head, whose weights for all copies are the same."""
        return self.to.tie_embeddings and name.startswith("final_norm.")

    def _spread(self, old: Tensor, tensor: TensorSpec, roles: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return the elements of a tensor at their new places, copies included, and a mask of new elements."""
        values, is_new = old.double(), torch.zeros(tensor.shape, dtype=torch.bool)
        for dim, role in enumerate(roles):
            index = self._index(role, old.shape[dim], tensor.shape[dim])
            values = values.index_select(dim, index.clamp(min=0))
            is_new |= (index < 0).view(-1, *[1] * (len(roles) - dim - 1))
        return values, is_new

    def _index(self, role: str, old: int, new: int) -> Tensor:
        """Return the old places of the elements along a dimension, -1 for new elements."""
        if role in (IN, OUT):
            return torch.arange(new).remainder(old)
        if role in (QUERIES, KEYS):
            heads = self._heads(role == KEYS)
            rows = torch.arange(new // len(heads))
            return torch.where(heads[:, None] < 0, -1, heads[:, None] * len(rows) + rows).flatten()
        return torch.where(torch.arange(new) < old, torch.arange(new), -1)

    def _heads(self, keys: bool) -> Tensor:
        """Return the old numbers of heads, -1 for new heads: heads stay with their key-value head."""
        before, after = self.model.num_kv_heads, self.to.num_kv_heads
        groups = torch.where(torch.arange(after) < before, torch.arange(after), -1)
        if keys:
            return groups
        old, new = self.model.num_heads // before, self.to.num_heads // after
        of_group = torch.where(torch.arange(new) < old, torch.arange(new), -1)
        both = groups[:, None] * old + of_group
        return torch.where((groups[:, None] < 0) | (of_group < 0), -1, both).flatten()

    def _silent(self, name: str) -> float | None:
        """Return the value of the tensors that make a new layer add nothing; None for other tensors."""
        layer, rest = int(name.split(".")[1]), name.split(".", 2)[2]
        module, _, kind = rest.rpartition(".")
        parts = surroundings(block_spec(self.to, layer))
        after = {part.name for part, at in parts if isinstance(part, NormSpec) and at.before and at.before.ends_branch}
        if module in after:
            return -float(NORMS[self.to.norm].facts["offset"]) if kind == "weight" else 0.0
        writes = OUT in self.roles(name) and not module.endswith("norm")
        return 0.0 if writes and not after else None

    def _draw(self, param: ParamSpec, tensor: TensorSpec) -> Tensor:
        """Draw the initial values of a tensor, f64."""
        drawn = torch.empty(tensor.shape)
        init_parameters([(drawn, ParamSpec(tensor.name, (tensor,), param.kind))], Topology(), Coord(), self.seed)
        return drawn.double()


def plan_growth(model: ModelConfig, to: ModelConfig, seed: int, where: str) -> ModelGrowth:
    """Return the growth of a model to another model, of the file `where`.

    Raises: ConfigError if no growth of the kinds above keeps the function
    """
    findings = [*_differences(model, to), *(finding for fails, finding in _obstacles(model, to) if fails)]
    places = None if findings else _places(model, to)
    if not findings and places is None:
        message = f"the windows, experts or exits of the {model.num_layers} layers would change, apart or first"
        findings = [Finding("model.num_layers", message, "a multiple, with model.window and model.exits in step")]
    if places is None:
        problems = [
            Problem(where, each.key, f"{each.message}: the function would change", each.hint) for each in findings
        ]
        raise ConfigError(problems)
    return ModelGrowth(model, to, places, seed)


def _differences(model: ModelConfig, to: ModelConfig) -> Iterator[Finding]:
    """Yield the keys that change the function, and sizes that shrink."""
    keys = [field.alias or name for name, field in ModelConfig.model_fields.items()]
    values = {key: (getattr(model, key), getattr(to, key)) for key in keys if key not in FREE}
    for key, (old, new) in values.items():
        if key in SIZES and new < old:
            yield Finding(f"model.{key}", f"{new} is less than the checkpoint's {old}", f"{old} or more")
        elif key not in SIZES and old != new:
            yield Finding(f"model.{key}", f"{new} here, {old} in the checkpoint", f"{old}")
    if model.position_rows != to.position_rows:
        hint = f"positions = {model.position_rows}"
        yield Finding("model.positions", f"{to.position_rows} here, {model.position_rows} in the checkpoint", hint)


def _obstacles(model: ModelConfig, to: ModelConfig) -> list[tuple[bool, Finding]]:
    """List the obstacles to an exact growth, and whether they are met here."""
    wider, deeper = to.hidden_size > model.hidden_size, to.num_layers > model.num_layers
    heads = (to.num_heads, to.num_kv_heads) != (model.num_heads, model.num_kv_heads)
    shared, sharing = to.num_heads // to.num_kv_heads, model.num_heads // model.num_kv_heads
    states, same_layers = has_states(to.attention_pattern), f"num_layers = {model.num_layers}"
    same_heads, multiple = f"num_heads = {model.num_heads}", f"a multiple of {model.hidden_size}"
    return [
        (all(getattr(model, key) == getattr(to, key) for key in SIZES),
         Finding("model", "no size is larger than the checkpoint's", f"a larger {', '.join(SIZES)}")),
        (to.unit_scaling, Finding("model.unit_scaling", "its factors follow the sizes", "a model without it")),
        (deeper and to.residual_tau > 0,
         Finding("model.residual_tau", "a layer that adds nothing scales the residual stream", "num_layers as it was")),
        (to.hidden_size % model.hidden_size > 0,
         Finding("model.hidden_size", f"elements are copied, and {to.hidden_size} is no {multiple}", multiple)),
        (wider and to.mtp_layers > 0,
         Finding("model.mtp_layers", "their merge reads two vectors of the width", "hidden_size as it was")),
        (heads and to.qk_norm == "full",
         Finding("model.qk_norm", "the norm's mean is over all heads, also new ones", same_heads)),
        (heads and to.kv_lora_rank > 0,
         Finding("model.num_heads", "heads of latent attention do not grow", same_heads)),
        (heads and to.sparse_attention is not None,
         Finding("model.num_heads", "the blocks that a head sees follow its number", same_heads)),
        (heads and states,
         Finding("model.num_heads", "decays of linear attention follow the number of heads", same_heads)),
        (deeper and states,
         Finding("model.num_layers", "decays of linear attention follow the number of layers", same_layers)),
        (shared < sharing,
         Finding("model.num_kv_heads", f"{sharing} heads share a key-value head, and {shared} would", "fewer")),
    ]  # fmt: skip


def _places(model: ModelConfig, to: ModelConfig) -> tuple[int, ...] | None:
    """Return the new places of layers, evenly among new layers or before them, with the same windows, experts and
    exits; None without such places.
    """
    old, new = model.num_layers, to.num_layers
    for places in (tuple(layer * new // old for layer in range(old)), tuple(range(old))):
        same = all(
            _reach(model, layer) == _reach(to, place) and model.has_experts(layer) == to.has_experts(place)
            for layer, place in enumerate(places)
        )
        if same and [places[after - 1] + 1 for after in model.exits] == to.exits:
            return places
    return None


def _reach(model: ModelConfig, layer: int) -> Reach:
    """Return the keys that queries of a layer see."""
    sparse = model.sparse_pattern
    return (sparse and sparse.by_layer(model.num_layers)[layer]) or model.given_window(layer)
