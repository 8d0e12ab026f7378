"""Growth of a checkpoint to one of a wider and deeper model that keeps its function (`grow`).

    hidden_size x k    tensors that write the residual stream have every row k times; readers have W / k + R_i
                       for copy i, with random R_i of sum 0, by which the gradients of copies differ
                       (LEMON, Wang et al. 2024). Norms see k equal copies: the mean square and epsilon are unchanged
    heads, MLP width   new rows are random; the columns for them are zero (Net2Net, Chen et al. 2016)
    num_layers         new layers, between or after the others, are random but for their last projections, or the gains
                       of the norms after a branch, which are zero

A tied head reads k copies of each column: the gain of the final norm is divided by k. Gradients of a tensor that writes
the residual stream are 1 / k of the old ones, and so are first moments; second moments 1 / k^2. New elements have no
moments. All other state stays as saved: the next run has the same step, samples and tokens, and the same place in the
learning rate's schedule. State is by global name, for any layout.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from megascale.catalog.layers import ACTIVATIONS, BLOCKS, NORMS
from megascale.checkpoint import offline
from megascale.checkpoint.companions import copy_companions
from megascale.checkpoint.format import manifest
from megascale.config.attention_pattern import has_states
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.toml_writer import toml_value
from megascale.convert.saved_weights import saved_model
from megascale.core.errors import CheckpointError, ConfigError, Problem
from megascale.core.files import atomic_folder
from megascale.core.storage import Location
from megascale.layout.freezing import matches
from megascale.layout.parameters import all_params
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import Coord, Topology
from megascale.model.initialize import init_parameters
from megascale.parallel.stateful import AVERAGE, BALANCE_BIAS, WEIGHTS

SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "expert_ffn_size", "shared_ffn_size")
"""The keys of `[model]` that may grow."""

FREE = ("preset", "seq_length", "dropout", "init_std", "mup_base_width", "window", "exits")
"""The keys without an effect on the function, and those compared layer by layer."""

IN, OUT, HEADS, OTHER = "in", "out", "heads", "other"
"""Roles of a dimension: input from or output to the residual stream; query heads; any other, with new elements last."""

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

MOMENTS = {"exp_avg": 1, "momentum": 1, "exp_avg_sq": 2}  # state that follows the gradient, to a power
LAYERED = (BALANCE_BIAS, "expert_choices")  # vectors [layers x experts]
BEGIN_ANEW = {
    "fp8_history": "the largest values of FP8 operands in past steps; the next steps measure them",
    "low": "what rounding left of compensated bf16 weights; it is added to nothing: the weights keep their bf16 values",
}
"""State that does not grow, and what it is."""


def grow(source: Location, output: Path, to: ModelConfig, seed: int, where: str) -> list[str]:
    """Make a checkpoint of the model `to` with the function of that of `source`. Returns lines on state that begins
    anew. `seed`: of new weights; `where`: the file of `to`.

    Raises: ConfigError if the model cannot grow to it, CheckpointError if the checkpoint is unreadable or has state
        that cannot grow; OSError
    """
    saved = manifest.read(source)
    growth = plan_growth(saved_model(source, saved), to, seed, where)
    train = saved.facts.config.get("train") or {}
    freeze, model = train.get("freeze", []), to.model_dump(mode="json", by_alias=True)
    likes = growth.likes(freeze)
    frozen = [name for name, like in likes.items() if matches(like, freeze)]  # layers have other numbers
    config = {**saved.facts.config, "model": model, "train": {**train, "freeze": frozen}}
    with atomic_folder(output) as folder:
        companions = copy_companions(source, Location(str(folder)))
        offline.write_state(folder, _tensors(source, saved, growth, likes), config, companions, saved.facts.progress)
    kinds = {name.partition(".")[0] for name in saved.tensors}
    return [f"{kind} begins anew: {what}" for kind, what in BEGIN_ANEW.items() if kind in kinds]


def _tensors(
    source: Location, saved: manifest.Manifest, growth: ModelGrowth, likes: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the grown checkpoint. `likes`: those with the same kinds of state before."""
    read, kinds = partial(offline.read_tensor, source, saved), defaultdict[str, list[str]](list)
    for kind, _, of in (name.partition(".") for name in saved.tensors):
        if kind not in BEGIN_ANEW:
            kinds[of].append(kind)  # of state, by tensor
    others = kinds.keys() - likes.values()
    for name in (name for name in saved.tensors if name.partition(".")[2] in others):
        whole = read(name)
        if name in LAYERED:  # with zeros for new layers
            rows = whole.view(growth.model.total_layers, -1)
            whole = torch.cat([torch.zeros_like(rows[0]) if old is None else rows[old] for old in growth.olds])
        yield name, whole
    for name, like in likes.items():
        old = growth.source(name)
        for kind in kinds[like]:
            stored, values = saved.tensors[f"{kind}.{like}"], read(f"{kind}.{old}") if old else None
            if f"{kind}." == WEIGHTS or kind.startswith(AVERAGE):
                grown = growth.weight(name, values)
            elif kind in MOMENTS and stored.shape == saved.tensors[f"{WEIGHTS}{like}"].shape:
                grown = growth.moment(name, values, MOMENTS[kind])
            else:
                what = f"{source}: {kind}.{like}, state of its optimizer, has no rule by which it grows"
                raise CheckpointError(what, hint="go on with adamw, lion or muon before, whose moments grow")
            yield f"{kind}.{name}", grown.to(stored.torch_dtype)


@dataclass(frozen=True)
class ModelGrowth:
    """The growth of a model to another model, accepted by `plan_growth`. `olds`: the number of each layer before, None
    for new ones; `seed`: of new weights.
    """

    model: ModelConfig
    to: ModelConfig
    olds: tuple[int | None, ...]
    seed: int

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

    def likes(self, freeze: Sequence[str]) -> dict[str, str]:
        """Return for each tensor the one before that has the same kinds of state: of a new layer, the same in another
        layer, if possible one that the patterns `freeze` do not match.
        """
        suffix, olds = partial(re.sub, r"^layers\.\d+", ""), [t.name for p in all_params(self.model) for t in p.parts]
        alike = {suffix(name): name for name in sorted(olds, key=lambda name: not matches(name, freeze))}
        return {name: self.source(name) or alike[suffix(name)] for name in self.tensors}

    def weight(self, name: str, old: Tensor | None) -> Tensor:
        """Return a weight of the grown model, f64; `old`: before."""
        param, tensor = self.tensors[name]
        drawn, roles = torch.empty(tensor.shape), self._roles(name)
        init_parameters([(drawn, ParamSpec(name, (tensor,), param.kind))], Topology(), Coord(), self.seed)
        drawn = drawn.double()
        if old is None:
            return drawn if (value := self._silent(name)) is None else torch.full_like(drawn, value)
        values, copies = self._spread(name, old), tensor.shape[-1] // old.shape[-1]
        if self._divides_logits(name):
            offset = self._offset(name)
            return (values + offset) / copies - offset
        if OUT in roles:
            return values
        if roles[-1] == IN and copies > 1:
            noise = drawn.unflatten(-1, (copies, -1))
            values = values / copies + (noise - noise.mean(-2, keepdim=True)).flatten(-2)
        return torch.where(self._spread(name, torch.ones_like(old)) > 0, values, drawn)

    def moment(self, name: str, old: Tensor | None, power: int) -> Tensor:
        """Return a moment of the gradient to a `power`, f64; `old`: before."""
        if old is None:
            return torch.zeros(self.tensors[name][1].shape)
        shared = OUT in self._roles(name) and not self._divides_logits(name)
        return self._spread(name, old) / ((self.to.hidden_size // self.model.hidden_size) ** power if shared else 1)

    @cached_property
    def _probes(self) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of the tensors in models of twice the width, and of twice the heads."""
        sizes = ({key: 2 * getattr(self.to, key)} for key in ("hidden_size", "num_heads"))
        models = (self.to.model_copy(update={"explicit_head_dim": self.to.head_dim} | size) for size in sizes)
        return [{tensor.name: tensor.shape for p in all_params(model) for tensor in p.parts} for model in models]

    def _roles(self, name: str) -> tuple[str, ...]:
        """Return the roles of the dimensions of a tensor."""
        param, tensor = self.tensors[name]
        shapes = zip(tensor.shape, *(probe[name] for probe in self._probes), strict=True)
        *roles, last = (OUT if wide > size else HEADS if many > size else OTHER for size, wide, many in shapes)
        return *roles, IN if last == OUT and param.kind in ("matrix", "head") else last

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
            models = (self.model, self.to) if role == HEADS else ()
            before, after = [(m.num_kv_heads, m.num_heads // m.num_kv_heads) for m in models] or [(1, 1), (1, 1)]
            kept = *before, old.shape[dim] // math.prod(before)
            places = torch.arange(shape[dim]).view(*after, -1)[tuple(map(slice, kept))].flatten()
            grown = values.new_zeros(*values.shape[:dim], shape[dim], *values.shape[dim + 1 :])
            values = grown.index_copy_(dim, places, values)
        return values


def plan_growth(model: ModelConfig, to: ModelConfig, seed: int, where: str) -> ModelGrowth:
    """Return the growth of a model to another model, of the file `where`.

    Raises: ConfigError if no growth of the kinds above keeps the function
    """
    findings = [*_plug_ins(model), *_obstacles(model, to)]
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


def _plug_ins(model: ModelConfig) -> Iterator[Finding]:
    """Yield the keys that name another package's code: rules of growth hold for the tensors of built-in layers."""
    named = {"block": BLOCKS[model.block], "norm": NORMS[model.norm], "activation": ACTIVATIONS[model.activation]}
    kinds = {model.attention_kind(layer).name: model.attention_kind(layer) for layer in range(model.total_layers)}
    for key, card in (*named.items(), *(("attention_pattern", kind) for kind in kinds.values())):
        if not card.built_in:
            message = f"there is no rule by which {card.name}, a plug-in, grows"
            yield Finding(f"model.{key}", message, "train the larger model from its start, or one of built-in layers")


def _obstacles(model: ModelConfig, to: ModelConfig) -> Iterator[Finding]:
    """Yield the keys that change the function, the sizes that shrink, and other obstacles to an exact growth."""
    if all(getattr(model, key) == getattr(to, key) for key in SIZES):
        yield Finding("model", "no size is larger than the checkpoint's", f"a larger {', '.join(SIZES)}")
    if to.unit_scaling:
        yield Finding("model.unit_scaling", "its factors follow the sizes", "a model without it")
    sharing, shared = (each.num_heads // each.num_kv_heads for each in (model, to))
    for key in (field.alias or name for name, field in ModelConfig.model_fields.items() if name not in FREE):
        old, new = (each.position_rows if key == "positions" else getattr(each, key) for each in (model, to))
        message, hint = "", f"leave out {key}" if old is None else f"{key} = {toml_value(old)}"
        if key not in SIZES and old != new:
            here, there = ("none" if value is None else toml_value(value) for value in (new, old))
            message = f"{here} here, {there} in the checkpoint"
        elif key in SIZES and new < old:
            message, hint = f"{new} is less than the checkpoint's {old}", f"{old} or more"
        elif key == "hidden_size" and new % old:
            message, hint = f"elements are copied, and {new} is no multiple of {old}", f"a multiple of {old}"
        elif key == "num_kv_heads" and shared < sharing:
            message, hint = f"{sharing} heads share a key-value head, and {shared} would", "fewer"
        reasons = [reason for grown, holds, reason in OBSTACLES if grown == key and old != new and holds(to)]
        yield from (Finding(f"model.{key}", each, hint) for each in ([message] if message else reasons))


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
