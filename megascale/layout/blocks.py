"""Transformer blocks, each described once as a list of its parts in the order of a forward.

Parameters, FLOPs, traffic, memory and time of a block, and the choice of what FP8 casts, are computed from this list;
`megascale.model.block` runs what it says. A further kind of block is a module, a description, and a card of
`catalog.layers` that names both. Sizes are those of the whole block, before tensor parallelism cuts anything.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from megascale.catalog.layers import BLOCKS
from megascale.config.model import ModelConfig


@dataclass(frozen=True)
class Linear:
    """A linear layer: a GEMM [tokens, inputs] x [inputs, outputs].

    `name`: its path inside the block, such as 'attention.qkv'. `parts`: rows of its weight by logical part, one above
    the other. `label`: its name in the ledger of communication. `fp8`: FP8 may multiply it; a router, say, stays in the
    dtype of compute.
    """

    name: str
    label: str
    inputs: int
    parts: tuple[tuple[str, int], ...]
    fp8: bool = True

    @property
    def outputs(self) -> int:
        """Rows of the weight [outputs, inputs]."""
        return sum(rows for _, rows in self.parts)

    @property
    def elements(self) -> int:
        """Elements of the weight."""
        return self.outputs * self.inputs


@dataclass(frozen=True)
class Norm:
    """A norm of a tensor of the residual stream's width. `name`: its path inside the block."""

    name: str


@dataclass(frozen=True)
class Linears:
    """Linear layers side by side, which share their collectives over tp and the FP8 copy of what they share."""

    layers: tuple[Linear, ...]

    @property
    def fp8(self) -> bool:
        """FP8 may multiply them: all of them, or none."""
        allowed = {layer.fp8 for layer in self.layers}
        assert len(allowed) == 1, f"{self.label}: side by side, all are multiplied in FP8 or none"
        return allowed.pop()

    @property
    def label(self) -> str:
        """Their name in the ledger, such as 'qkv and up'."""
        return " and ".join(layer.label for layer in self.layers)

    @property
    def elements(self) -> int:
        """Elements of their weights."""
        return sum(layer.elements for layer in self.layers)


@dataclass(frozen=True)
class Columns(Linears):
    """Column-parallel layers of one input, which sequence parallelism gathers before them; each rank of tp has a part
    of every output.
    """


@dataclass(frozen=True)
class Rows(Linears):
    """Row-parallel layers, each of its own input, of which each rank of tp has a part; their outputs are summed over
    the layers and over tp.
    """


@dataclass(frozen=True)
class Attention:
    """The core of attention, from q, k and v to what the heads attend to. `window`: keys that a query sees, None for
    its whole past.
    """

    heads: int
    kv_heads: int
    width: int
    window: int | None

    @property
    def attended(self) -> int:
        """Elements of the result for each token."""
        return self.heads * self.width

    @property
    def qkv(self) -> int:
        """Elements of q, k and v for each token."""
        return (self.heads + 2 * self.kv_heads) * self.width


@dataclass(frozen=True)
class Activation:
    """The non-linearity of an MLP: elements for each token before and after it."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class Residual:
    """A branch is added to the residual stream, after dropout where the model has any."""


RECENT = 16
"""Models whose blocks are kept: layouts of a search share one."""

Part = Norm | Columns | Rows | Attention | Activation | Residual
Block = tuple[Part, ...]
Kind = TypeVar("Kind")


def block(model: ModelConfig, layer: int) -> Block:
    """The parts of layer number `layer` of a model, in the order of its forward."""
    return _description(model)(model, layer)


def _description(model: ModelConfig) -> Callable[[ModelConfig, int], Block]:
    module, _, name = BLOCKS[model.block].facts["description"].partition(":")
    description: Callable[[ModelConfig, int], Block] = getattr(importlib.import_module(module), name)
    return description


@lru_cache(RECENT)
def kinds(model: ModelConfig) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """List the distinct blocks of a model, and for each layer the number of its own."""
    description = _description(model)
    described = [description(model, layer) for layer in range(model.num_layers)]
    distinct = tuple(dict.fromkeys(described))
    return distinct, tuple(distinct.index(each) for each in described)


def parts(block: Block, kind: type[Kind]) -> Iterator[Kind]:
    """The parts of one kind."""
    return (part for part in block if isinstance(part, kind))


def linears(block: Block) -> Iterator[Linear]:
    """The linear layers of a block."""
    return (layer for group in parts(block, Linears) for layer in group.layers)


def weights(block: Block) -> int:
    """Count the elements of a block's weights."""
    return sum(layer.elements for layer in linears(block))


def entering(block: Block) -> int:
    """How many norms are the input of column-parallel layers, which recomputation may form again instead of keeping."""
    return sum(isinstance(part, Norm) and isinstance(then, Columns) for part, then in itertools.pairwise(block))


def unread(block: Block) -> Rows | None:
    """The row-parallel layers whose output is the block's result but for the residual stream: where a whole block is
    recomputed no gradient needs their output. None if a later part does.
    """
    last = next((part for part in reversed(block) if not isinstance(part, Residual)), None)
    return last if isinstance(last, Rows) else None


def operands(block: Block) -> Iterator[str]:
    """The operands that FP8 casts, such as 'mlp.up.weight': of each linear layer its input, its weight and the gradient
    of its output. Layers side by side share one input or one gradient, which goes by the name of the first.
    """
    for group in parts(block, Linears):
        for index, layer in enumerate(group.layers if group.fp8 else ()):
            if index == 0 or isinstance(group, Rows):
                yield f"{layer.name}.input"
            yield f"{layer.name}.weight"
            if index == 0 or isinstance(group, Columns):
                yield f"{layer.name}.gradient"


def serial(model: ModelConfig, layer: int) -> Block:
    """x + attention(norm(x)), then + mlp(norm(.))."""
    return (
        Norm("attention_norm"),
        Columns((qkv(model),)),
        attention(model, layer),
        Rows((out(model),)),
        Residual(),
        Norm("mlp_norm"),
        Columns((up(model),)),
        activation(model),
        Rows((down(model),)),
        Residual(),
    )


def parallel(model: ModelConfig, layer: int) -> Block:
    """x + attention(norm(x)) + mlp(norm(x))."""
    return (
        Norm("norm"),
        Columns((qkv(model), up(model))),
        attention(model, layer),
        activation(model),
        Rows((out(model), down(model))),
        Residual(),
    )


def qkv(model: ModelConfig) -> Linear:
    """The layer that forms q, k and v."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return Linear("attention.qkv", "qkv", model.hidden_size, (("q", q), ("k", kv), ("v", kv)))


def attention(model: ModelConfig, layer: int) -> Attention:
    """The attention of a layer."""
    return Attention(model.num_heads, model.num_kv_heads, model.head_dim, model.windows[layer])


def out(model: ModelConfig) -> Linear:
    """The layer from what the heads attend to back into the residual stream."""
    return Linear("attention.out", "out", model.num_heads * model.head_dim, (("out", model.hidden_size),))


def up(model: ModelConfig) -> Linear:
    """The first layer of the MLP, with a gated activation gate and up at once."""
    if model.gated:
        return Linear("mlp.gate_up", "up", model.hidden_size, (("gate", model.ffn_size), ("up", model.ffn_size)))
    return Linear("mlp.up", "up", model.hidden_size, (("up", model.ffn_size),))


def activation(model: ModelConfig) -> Activation:
    """The non-linearity of the MLP."""
    return Activation((2 if model.gated else 1) * model.ffn_size, model.ffn_size)


def down(model: ModelConfig) -> Linear:
    """The MLP's layer back into the residual stream."""
    return Linear("mlp.down", "down", model.ffn_size, (("down", model.hidden_size),))
