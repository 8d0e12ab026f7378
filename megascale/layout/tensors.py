"""Every tensor of the model by its global name: shape, how tensor parallelism cuts it, how it starts, whether it
decays.

Initialisation, sharding, checkpoints, parameter counts and memory all read this one list. A `Parameter` is what a
module holds: one tensor, or several that are multiplied at once (q, k and v; gate and up), one above the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megascale.catalog.layers import BLOCKS
from megascale.config.model import ModelConfig

Start = Literal["normal", "zeros", "ones"]

VOCAB_MULTIPLE = 64
"""Rows of the vocabulary on each rank are a multiple of this: what tensor cores want. Padding rows stay zero."""

TOKEN_EMBEDDING = "embedding.token.weight"
HEAD = "head.weight"  # where it is not the token embedding


@dataclass(frozen=True)
class Tensor:
    """A tensor as a checkpoint knows it. `split`: the dimension that tp cuts, None where each rank holds it whole."""

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    start: Start = "normal"
    std: float = 0.0
    padded: int = 0  # rows with padding that tp cuts, where they are more than shape[0]

    def local(self, rank: int, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and size of the box of this tensor that tp rank `rank` of `tp` holds, without padding."""
        offset, size = [0] * len(self.shape), list(self.shape)
        if self.split is not None:
            each = (self.padded or self.shape[self.split]) // tp
            total = self.shape[self.split]
            offset[self.split] = min(rank * each, total)
            size[self.split] = min((rank + 1) * each, total) - offset[self.split]
        return tuple(offset), tuple(size)


@dataclass(frozen=True)
class Parameter:
    """What a module holds: `tensors` joined along their first dimension. `name` is the module's path to it."""

    name: str
    tensors: tuple[Tensor, ...]

    @property
    def split(self) -> int | None:
        """The dimension that tp cuts, None where each tp rank holds the whole."""
        return self.tensors[0].split

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.tensors[0].shape) > 1

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape on one tp rank, with padding."""
        rows = 0
        for tensor in self.tensors:
            full = tensor.padded or tensor.shape[0]
            rows += full // tp if tensor.split == 0 else full
        rest = list(self.tensors[0].shape[1:])
        if self.split == 1:
            rest[0] //= tp
        return (rows, *rest)

    def local_numel(self, tp: int) -> int:
        """Numbers on one tp rank, with padding."""
        return math.prod(self.local_shape(tp))


def _norm(name: str, model: ModelConfig) -> list[Parameter]:
    shape = (model.hidden_size,)
    found = [Parameter(f"{name}.weight", (Tensor(f"{name}.weight", shape, start="ones"),))]
    if model.norm == "layernorm":
        found.append(Parameter(f"{name}.bias", (Tensor(f"{name}.bias", shape, start="zeros"),)))
    return found


def _linear(
    name: str, model: ModelConfig, parts: dict[str, int], columns: int, split: int, std: float
) -> list[Parameter]:
    """A linear layer of outputs `parts` (name to rows) and `columns` inputs; split 0 cuts outputs, 1 inputs."""
    prefix = name.rpartition(".")[0]
    weights = tuple(Tensor(f"{prefix}.{part}.weight", (rows, columns), split, std=std) for part, rows in parts.items())
    found = [Parameter(f"{name}.weight", weights)]
    if model.bias:
        cut = 0 if split == 0 else None
        biases = tuple(Tensor(f"{prefix}.{part}.bias", (rows,), cut, "zeros") for part, rows in parts.items())
        found.append(Parameter(f"{name}.bias", biases))
    return found


def layer(model: ModelConfig, index: int) -> list[Parameter]:
    """The parameters of one transformer block."""
    name, hidden, head = f"layers.{index}", model.hidden_size, model.head_dim
    std, std_out = model.init_std, model.init_std / math.sqrt(2 * model.num_layers)
    qkv = {"q": model.num_heads * head, "k": model.num_kv_heads * head, "v": model.num_kv_heads * head}
    up = {"gate": model.ffn_size, "up": model.ffn_size} if model.gated else {"up": model.ffn_size}
    shared = BLOCKS[model.block].facts["norms"] == 1
    return [
        *_norm(f"{name}.norm" if shared else f"{name}.attention_norm", model),
        *_linear(f"{name}.attention.qkv", model, qkv, hidden, 0, std),
        *_linear(f"{name}.attention.out", model, {"out": hidden}, model.num_heads * head, 1, std_out),
        *([] if shared else _norm(f"{name}.mlp_norm", model)),
        *_linear(f"{name}.mlp.{'gate_up' if model.gated else 'up'}", model, up, hidden, 0, std),
        *_linear(f"{name}.mlp.down", model, {"down": hidden}, model.ffn_size, 1, std_out),
    ]


def padded_vocab(model: ModelConfig, tp: int) -> int:
    """Rows of the vocabulary with padding: a multiple of VOCAB_MULTIPLE on each of tp ranks."""
    unit = VOCAB_MULTIPLE * tp
    return math.ceil(model.vocab_size / unit) * unit


def _vocabulary(name: str, model: ModelConfig, tp: int) -> Parameter:
    shape = (model.vocab_size, model.hidden_size)
    return Parameter(name, (Tensor(name, shape, 0, std=model.init_std, padded=padded_vocab(model, tp)),))


def embedding(model: ModelConfig, tp: int) -> list[Parameter]:
    """The parameters before the first layer."""
    found = [_vocabulary(TOKEN_EMBEDDING, model, tp)]
    if model.position == "learned":
        shape = (model.seq_length, model.hidden_size)
        found.append(
            Parameter("embedding.position.weight", (Tensor("embedding.position.weight", shape, std=model.init_std),))
        )
    return found


def head(model: ModelConfig, tp: int) -> list[Parameter]:
    """The parameters after the last layer. A tied head is the token embedding under its own name."""
    name = TOKEN_EMBEDDING if model.tie_embeddings else HEAD
    return [*_norm("final_norm", model), _vocabulary(name, model, tp)]


def stage(model: ModelConfig, tp: int, layers: range, first: bool, last: bool) -> list[Parameter]:
    """The parameters of a pipeline stage, each once: a stage that has both ends holds a tied embedding once."""
    found = embedding(model, tp) if first else []
    for index in layers:
        found += layer(model, index)
    if last:
        known = {parameter.name for parameter in found}
        found += [parameter for parameter in head(model, tp) if parameter.name not in known]
    return found


def whole(model: ModelConfig) -> list[Parameter]:
    """The parameters of the whole model on one rank."""
    return stage(model, 1, range(model.num_layers), first=True, last=True)
