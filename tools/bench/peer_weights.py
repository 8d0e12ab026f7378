"""Initial weights of the peers' scripts under megascale's parameter names.

The values depend only on seed and parameter name. They are drawn here and permuted to megascale's layout: both scripts
store q, k and v per head, and torch-native's rotary embedding rotates adjacent pairs, megascale's the halves of a head.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from megascale.config.model import ModelConfig
from megascale.layout.tensors import ParamSpec
from megascale.layout.topology import Coord, Topology

Draw = Callable[[str, tuple[int, ...]], Tensor]
"""Function that draws a full tensor, given its name in megascale's checkpoints and its shape."""


@torch.no_grad()
def fill(target: Tensor, parameter: ParamSpec, topology: Topology, coord: Coord, draw: Draw) -> None:
    """Write the values of `parameter` on the rank at `coord` into `target` [local shape], padding as zero."""
    target.zero_()
    row = 0
    for tensor in parameter.parts:
        offset, size = tensor.local_box(topology, coord)
        box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        target[row : row + size[0]] = draw(tensor.name, tensor.shape)[box]
        row += size[0]


def torch_native(model: ModelConfig, seed: int) -> Draw:
    """Return the initialisation of torch_native_cpu.py and torchtitan_cpu.py."""
    names = {
        "embedding.token": "tok_embeddings", "head": "lm_head",
        "attention.out": "attention.wo", "attention.qkv": "attention.qkv_linear.wqkv",
        "mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2",
    }  # fmt: skip

    def normal(name: str, shape: tuple[int, ...]) -> Tensor:
        prefix, part = _split(name)
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(f"{prefix}{names[part]}.weight".encode()))
        return torch.randn(shape, generator=generator) * 0.02

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        if name.endswith((".q.weight", ".k.weight", ".v.weight")):
            rows = _of_qkv(name, model, normal)
            pairs = rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            return (rows if name.endswith(".v.weight") else pairs).flatten(0, 1)
        return normal(name, shape)

    return draw


def megatron(model: ModelConfig, seed: int) -> Draw:
    """Return the initialisation of megatron_cpu.py."""
    names = {
        "embedding.token": "embedding.word_embeddings", "head": "output_layer",
        "attention.out": "self_attention.linear_proj", "attention.qkv": "self_attention.linear_qkv",
        "mlp.gate": "mlp.linear_fc1", "mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2",
        "router": "mlp.router", "experts.gate_up": "linear_fc1", "experts.down": "linear_fc2",
    }  # fmt: skip

    def normal(name: str, shape: tuple[int, ...], module: str = "") -> Tensor:
        prefix, part = _split(name)
        theirs = f"{'decoder.' if prefix else ''}{prefix}{module}{names[part]}.weight"
        digest = hashlib.sha256(f"{seed}/{theirs}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        full = torch.empty(shape).normal_(0, 0.02, generator=generator)
        return full / math.sqrt(2 * model.num_layers) if part in ("attention.out", "mlp.down", "experts.down") else full

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        if name.endswith((".q.weight", ".k.weight", ".v.weight")):
            return _of_qkv(name, model, normal).flatten(0, 1)
        if name.endswith((".gate.weight", ".up.weight")):
            return normal(name, (2 * shape[0], shape[1])).chunk(2)[name.endswith(".up.weight")]
        if ".experts." in name:
            modules = [f"mlp.experts.local_experts.{expert}." for expert in range(shape[0])]
            matrix = math.prod(shape[1:-1]), shape[-1]
            return torch.stack([normal(name, matrix, module) for module in modules]).view(shape)
        return normal(name, shape)

    return draw


FAMILIES = {"torch-native": torch_native, "megatron-core": megatron}


def _split(name: str) -> tuple[str, str]:
    """Split `layers.3.mlp.up.weight` into the layer `layers.3.` and the part `mlp.up`."""
    words = name.removesuffix(".weight").split(".")
    return ("".join(f"{w}." for w in words[:2]), ".".join(words[2:])) if words[0] == "layers" else ("", ".".join(words))


def _of_qkv(name: str, model: ModelConfig, normal: Draw) -> Tensor:
    """Return the rows of q, k or v, [heads, head_dim, hidden], from a matrix that stores q, k, v per head."""
    heads, d, hidden = model.num_heads, model.head_dim, model.hidden_size
    prefix, part, _ = name.rsplit(".", 2)
    full = normal(f"{prefix}.qkv.weight", (3 * heads * d, hidden))
    return full.view(heads, 3, d, hidden)[:, "qkv".index(part)]
