"""Who carries out an operation: for each, the implementations that can be asked for, the best first."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megascale.catalog.layers import BLOCKS
from megascale.catalog.recipes import RECIPES
from megascale.core.registry import Card, Registry

AUTO = "auto"
"""The first backend of an operation that is present and can serve."""

FORMATS = ("float32", "bfloat16")
"""Of torch, in which libraries have kernels."""


@dataclass(frozen=True)
class Need:
    """The demands on an operation that follow from a configuration alone.

    `name`: of the norm, activation, position, optimizer, grain or, for wgrad, number format; of other operations None.
    Numbers in that format of torch; `dropout` of attention weights; a cut over `tp` ranks; the `grain` of the scales of
    fp8 products (`catalog.recipes`), None without; heads of `head_dim`; rows of `columns` numbers, of a norm or an
    activation; and layers with sliding `windows`. `used`: whether the model has the operation at all.
    """

    name: str | None
    number_format: str
    dropout: bool
    tp: int
    grain: str | None
    head_dim: int
    columns: int
    windows: bool
    used: bool = True

    @classmethod
    def of(cls, operation: str, model: Any, number_format: str, optimizer: str, tp: int, recipe: str | None) -> Need:
        """From `[model]`, the optimizer's name and that of the fp8 recipe, None without."""
        grain = RECIPES[recipe].facts["grain"] if recipe else None
        names = {
            "norm": model.norm, "add_norm": model.norm, "activation": model.activation, "rope": model.position,
            "optimizer": optimizer, "linear": grain, "wgrad": number_format,
        }  # fmt: skip
        used = {"rope": model.position == "rope", "add_norm": "add_norm" in BLOCKS[model.block].facts["operations"]}
        columns = model.ffn_size // tp if operation == "activation" else model.hidden_size
        rest = model.head_dim, columns, any(model.windows)
        found = cls(names.get(operation), number_format, model.dropout > 0, tp, grain, *rest)
        return replace(found, used=used.get(operation, True))


def lacks(card: Card, need: Need) -> str | None:
    """What of a need a backend lacks by the facts of its card, None if nothing: `serves` (names), `formats` and
    `grains`, empty or absent for all; `dropout` and `cut`, false where it cannot; `least_head` and `most_head`, sizes
    of heads; `columns`, the most in a row; `windows`, true where it serves nothing else.
    """
    facts = card.facts
    if facts.get("serves") and need.name not in facts["serves"]:
        return f"has no {need.name}"
    if facts.get("formats") and need.number_format not in facts["formats"]:
        return f"has no {need.number_format}"
    if facts.get("grains") and need.grain not in facts["grains"]:
        return f"has no scales by {need.grain}" if need.grain else "casts to fp8, and nothing else"
    if need.dropout and not facts.get("dropout", True):
        return "draws dropout of its own, which would depend on the layout"
    if need.tp > 1 and not facts.get("cut", True):
        return "communicates by itself, which the ledger does not see: it serves tp = 1"
    if need.head_dim < (least := facts.get("least_head", 0)):
        return f"has heads of {least} or more, not of {need.head_dim}"
    if need.head_dim > (most := facts.get("most_head", math.inf)):
        return f"has heads of up to {most}, not of {need.head_dim}"
    if need.columns > (widest := facts.get("columns", math.inf)):
        return f"takes at most {widest} columns, not {need.columns}"
    if facts.get("windows") and not need.windows:
        return "is for layers with a window, and there is none"
    return None


def passes(card: Card, need: Need) -> bool:
    """Tell whether a backend makes several passes over memory where one kernel can do with one.

    Its fact `passes` has the names for which that is so, or True for all.
    """
    several = card.facts.get("passes", ())
    return need.used and (several is True or need.name in several)


def _card(name: str, help: str, body: str, serves: tuple[str, ...] = (), **facts: Any) -> Card:
    """`serves`: of a library's norms, activations and optimizers; empty for all, in all formats."""
    most = {"serves": serves, "formats": serves and FORMATS, "grains": (), "dropout": True, "cut": True,
            "least_head": 0, "most_head": math.inf, "columns": math.inf, "windows": False, "passes": ()}  # fmt: skip
    return Card(name, help, f"megascale.ops.{body}", most | facts)


ROW = 65536
"""Columns that Liger's kernels take at most: a row is one block."""

_HALF: dict[str, Any] = {"formats": ("bfloat16",), "dropout": False, "most_head": 256}
"""Of flash-attn's kernels, and of those that Transformer Engine calls."""

GRAINS = ("tensor", "row", "block")
"""Granularities of the scales of fp8 recipes."""

_CARDS = {
    "linear": [
        _card(
            "te",
            "Transformer Engine's products in fp8, and its casts",
            "te_linear:EngineLinear",
            grains=("tensor", "block"),
        ),
        _card("compile", "torch's products; casts to fp8 by torch.compile", "fp8:CompiledLinear", grains=GRAINS),
        _card("torch", "torch's products; casts to fp8 by torch's operators", "fp8:TorchLinear", passes=GRAINS),
    ],
    "attention": [
        _card("flash", "flash-attn (Dao 2023)", "flash:FlashAttention", **_HALF),
        _card("te", "Transformer Engine's DotProductAttention", "te_attention:EngineAttention", **_HALF),
        _card(
            "compile",
            "torch's FlexAttention, compiled, for layers with a window",
            "flex:FlexAttention",
            formats=FORMATS,
            dropout=False,
            least_head=16,
            windows=True,
        ),
        _card("torch", "torch's scaled_dot_product_attention", "attention:TorchAttention"),
    ],
    "rope": [
        _card("compile", "a formula by torch.compile", "rope:CompiledRope", ("rope",), formats=()),
        _card("te", "Transformer Engine's kernel, and a copy that joins values", "te:TERope", ("rope",)),
        _card("torch", "torch's operators", "rope:TorchRope", passes=("rope",)),
    ],
    "norm": [
        _card("te", "Transformer Engine's kernels", "te:TENorm", ("layernorm", "rmsnorm")),
        _card("liger", "Liger's kernels", "liger:LigerNorm", ("layernorm", "rmsnorm"), columns=ROW),
        _card("apex", "Apex's kernels", "apex_norm:ApexNorm", ("layernorm", "rmsnorm")),
        _card("compile", "a formula by torch.compile", "compiled:CompiledNorm"),
        _card("torch", "torch's operators", "norm:TorchNorm", passes=("rmsnorm",)),
    ],
    "add_norm": [
        _card("liger", "Liger's kernel", "liger:LigerAddNorm", ("rmsnorm",), columns=ROW),
        _card("compile", "a formula by torch.compile", "compiled:CompiledAddNorm"),
        _card("torch", "torch's sum, then the backend of norms", "norm:TorchAddNorm", passes=True),
    ],
    "activation": [
        _card("te", "Transformer Engine's kernels", "te:TEActivation", ("gelu_tanh", "swiglu")),
        _card("liger", "Liger's kernel", "liger:LigerActivation", ("swiglu",), columns=ROW),
        _card("compile", "a formula by torch.compile", "compiled:CompiledActivation"),
        _card("torch", "torch's operators", "activation:TorchActivation", passes=("swiglu",)),
    ],
    "cross_entropy": [
        _card(
            "te",
            "Transformer Engine's kernels, of a release with overwrite_input (none up to 2.19)",
            "cross_entropy:TransformerEngineCrossEntropy",
            formats=FORMATS,
            cut=False,
        ),
        _card("compile", "torch.compile", "cross_entropy:CompiledCrossEntropy"),
        _card("torch", "torch's operators, over blocks of tokens", "cross_entropy:TorchCrossEntropy", passes=True),
    ],
    "wgrad": [
        _card("addmm", "torch's GEMM of bf16 factors into fp32", "wgrad:WideWgrad", formats=("bfloat16",)),
        _card("te", "Transformer Engine's GEMM", "wgrad:EngineWgrad", formats=("bfloat16",)),
        _card("apex", "NVIDIA Apex's GEMM", "apex:ApexWgrad", formats=("bfloat16",)),
        _card(
            "torch",
            "torch's operators: in bf16 a product, and a pass that adds it",
            "wgrad:TorchWgrad",
            passes=("bfloat16",),
        ),
    ],
    "optimizer": [
        _card("apex", "NVIDIA Apex's multi-tensor kernels", "apex:ApexOptimizer", ("adamw", "lamb")),
        _card("torch", "torch's fused kernels", "optimizer:TorchOptimizer"),
    ],
}

BACKENDS = {name: Registry(f"{name} backend", f"megascale.backends.{name}", cards) for name, cards in _CARDS.items()}
"""The registry of each operation, by its key in `[backends]`."""

FUSED = ("norm", "add_norm", "activation", "rope")
"""Operations that torch.compile fuses with what stands beside them in a block."""
