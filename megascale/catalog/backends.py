"""Backends of operations: a registry per operation, fastest backend first, and the facts of their cards.

`BACKENDS`, `AUTO`, `FUSIBLE_OPERATIONS`: the choices. `Requirement`, `unmet_requirement`, `is_multi_pass`: questions to
a card, answered from its facts without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascale.catalog.layers import BLOCKS
from megascale.catalog.recipes import RECIPES
from megascale.core.registry import Card, Registry

AUTO = "auto"  # the first supported backend of an operation
KERNEL_DTYPES = ("float32", "bfloat16")  # torch dtypes with kernels in the libraries


@dataclass(frozen=True)
class Requirement:
    """The demands of a configuration on a backend of an operation.

    `variant`: name of the norm, activation, position embedding, optimizer, scale granularity (linear) or dtype (wgrad);
    None for other operations. `dtype`: torch's name. `dropout`: on attention weights.
    `granularity`: of FP8 scales (`catalog.recipes`), None without FP8. `columns`: row length of a norm or activation.
    `has_window`: some layers have a sliding window. `logit_softcap`, `attention_softcap`: the logits, or the scores of
    attention, have a soft cap. `sparse`: heads see different blocks of keys. `document_mask`: attention stays within
    documents, and positions restart. `used`: the model contains the operation.
    """

    variant: str | None
    dtype: str
    dropout: bool
    granularity: str | None
    head_dim: int
    columns: int
    has_window: bool
    logit_softcap: bool
    attention_softcap: bool
    sparse: bool
    document_mask: bool
    used: bool

    @classmethod
    def for_operation(
        cls,
        operation: str,
        model: Any,
        dtype: str,
        optimizer: str,
        tp: int,
        recipe: str | None,
        *,
        document_mask: bool = False,
        attends_in_parts: bool = False,
    ) -> Requirement:
        """Derive the demands from `[model]`, the optimizer's name, the FP8 recipe's name or None, and whether attention
        stays within documents, and is to some of the keys at a time, by another operation, which attention with sinks
        is by, too.
        """
        granularity = RECIPES[recipe].facts["granularity"] if recipe else None
        names = {
            "norm": model.norm, "add_norm": model.norm, "activation": model.activation, "rope": model.position,
            "optimizer": optimizer, "linear": granularity, "wgrad": dtype,
        }  # fmt: skip
        scored = any("attention" in model.attention_kind(n).facts["operations"] for n in range(model.total_layers))
        used = {
            "rope": model.position == "rope" and scored,
            "add_norm": "add_norm" in BLOCKS[model.block].facts["operations"],
            "attention": scored and not model.attention_sinks,
            "partial_attention": scored and (attends_in_parts or model.attention_sinks),
        }  # fmt: skip
        inner = max(model.ffn_size // tp, model.expert_ffn_size if model.experts else 0)
        return cls(
            names.get(operation),
            dtype,
            model.dropout > 0,
            granularity,
            model.qk_head_dim,
            inner if operation == "activation" else model.hidden_size,
            any(model.windows),
            model.logit_softcap is not None,
            operation == "attention" and model.attention_softcap is not None,
            operation == "attention" and model.sparse_attention is not None,
            document_mask,
            used.get(operation, True),
        )


UNSUPPORTED = {
    "dropout": "draws dropout of its own, which would depend on the layout",
    "logit_softcap": "has no soft cap of logits",
    "attention_softcap": "has no soft cap of scores",
    "sparse": "has no mask by head, which sparse attention needs",
    "document_mask": "has no positions that restart within a row",
}
"""Why a backend cannot run, by the feature whose fact on its card is False."""


ONLY_IF_STATED = ("attention_softcap", "sparse")
"""Features that a card without their fact has not."""


def unmet_requirement(card: Card, requirement: Requirement) -> str | None:
    """Say which demand a backend does not meet, by the facts of its card; None if all are met.

    `variants`, `dtypes`, `granularities`: supported values, empty or absent for all. `dropout`, `logit_softcap`,
    `attention_softcap`, `sparse`, `document_mask`: False if unsupported; those of `ONLY_IF_STATED` also if absent.
    `min_head_dim`, `max_head_dim`, `max_columns`: limits. `window_only`: requires windows, a soft cap or documents.
    """
    facts = card.facts
    if facts.get("variants") and requirement.variant not in facts["variants"]:
        return f"has no {requirement.variant}"
    if facts.get("dtypes") and requirement.dtype not in facts["dtypes"]:
        return f"has no {requirement.dtype}"
    if facts.get("granularities") and requirement.granularity not in facts["granularities"]:
        granularity = requirement.granularity
        return f"has no scales by {granularity}" if granularity else "is for train.precision = 'fp8' only"
    for feature, reason in UNSUPPORTED.items():
        if getattr(requirement, feature) and not facts.get(feature, feature not in ONLY_IF_STATED):
            return reason
    masked = requirement.has_window or requirement.attention_softcap or requirement.document_mask
    if facts.get("window_only") and not masked:
        return "is for layers with a window, and there is none"
    return _exceeded_limit(facts, requirement)


def _exceeded_limit(facts: Mapping[str, Any], requirement: Requirement) -> str | None:
    if requirement.head_dim < (lower := facts.get("min_head_dim", 0)):
        return f"supports head dims from {lower}, not {requirement.head_dim}"
    if requirement.head_dim > (upper := facts.get("max_head_dim", math.inf)):
        return f"supports head dims up to {upper}, not {requirement.head_dim}"
    if requirement.columns > (upper := facts.get("max_columns", math.inf)):
        return f"supports at most {upper} columns, not {requirement.columns}"
    return None


def is_multi_pass(card: Card, requirement: Requirement) -> bool:
    """Return True if a backend makes several passes over memory where a single kernel would make one.

    The card's fact `multi_pass` lists the variants concerned, or is True for all.
    """
    variants = card.facts.get("multi_pass", ())
    return requirement.used and (variants is True or requirement.variant in variants)


def _card(name: str, help: str, body: str, variants: tuple[str, ...] = (), **facts: Any) -> Card:
    """Make a card with default facts. `variants` of a library come in KERNEL_DTYPES; empty: all, in all dtypes."""
    defaults = {
        "variants": variants, "dtypes": variants and KERNEL_DTYPES, "granularities": (), "dropout": True,
        "tensor_parallel": True, "min_head_dim": 0, "max_head_dim": math.inf, "max_columns": math.inf,
        "window_only": False, "logit_softcap": True, "attention_softcap": False, "sparse": False, "multi_pass": (),
    }  # fmt: skip
    return Card(name, help, f"megascale.ops.{body}", defaults | facts)


LIGER_MAX_COLUMNS = 65536  # the row limit of Liger's kernels, which process a row in one block

_FLASH_FACTS: dict[str, Any] = {"dtypes": ("bfloat16",), "dropout": False, "max_head_dim": 256}
"""Facts of flash-attn's kernels, and of the kernels called by Transformer Engine."""

GRANULARITIES = ("tensor", "row", "block", "mx", "nvfp4")  # granularities of FP8 scales

_CARDS = {
    "linear": [
        _card(
            "te", "Transformer Engine's FP8 GEMMs; casts in Triton", "te_linear:TEFp8",
            granularities=("tensor", "block"),
        ),
        _card("triton", "torch's FP8 GEMMs; casts and wgrad in Triton", "fp8:TritonFp8", granularities=GRANULARITIES),
        _card("torch", "torch's FP8 GEMMs; casts by torch's operators", "fp8:TorchFp8", multi_pass=GRANULARITIES),
    ],
    "attention": [
        _card("flash", "flash-attn (Dao 2023)", "flash:FlashAttention", attention_softcap=True, **_FLASH_FACTS),
        _card("te", "Transformer Engine's DotProductAttention", "te_attention:TEAttention", **_FLASH_FACTS),
        _card(
            "compile", "torch's FlexAttention, compiled, for layers with a window, a soft cap or documents",
            "flex:FlexAttention", dtypes=KERNEL_DTYPES, dropout=False, min_head_dim=16, window_only=True,
            attention_softcap=True, sparse=True,
        ),
        _card(
            "torch", "torch's scaled_dot_product_attention, by FlashAttention 3 or 4 if one is installed",
            "core_attention:TorchAttention", attention_softcap=True, sparse=True,
        ),
    ],
    "partial_attention": [
        _card("flash", "flash-attn (Dao 2023)", "flash_partial:FlashPartial", **_FLASH_FACTS),
        _card("varlen", "torch's flash-attn 2, or 3 or 4 if installed", "flash_partial:TorchVarlen", **_FLASH_FACTS),
        _card("torch", "torch's flash kernel for CPUs", "partial_attention:TorchFlash"),
    ],
    "rope": [
        _card("compile", "a formula, compiled by torch.compile", "compiled:CompiledRope", ("rope",), dtypes=()),
        _card("torch", "torch's operators", "rope:TorchRope", multi_pass=("rope",)),
    ],
    "norm": [
        _card("te", "Transformer Engine's kernels", "te:TENorm", ("layernorm", "rmsnorm", "rmsnorm_1p")),
        _card(
            "liger", "Liger's kernels", "liger:LigerNorm", ("layernorm", "rmsnorm", "rmsnorm_1p"),
            max_columns=LIGER_MAX_COLUMNS,
        ),
        _card("apex", "Apex's kernels", "apex:ApexNorm", ("layernorm", "rmsnorm")),
        _card("compile", "a formula, compiled by torch.compile", "compiled:CompiledNorm", finds_amax=True),
        _card("torch", "torch's operators", "norm:TorchNorm", multi_pass=("rmsnorm", "rmsnorm_1p")),
    ],
    "add_norm": [
        _card(
            "liger", "Liger's kernel", "liger:LigerAddNorm", ("rmsnorm", "rmsnorm_1p"), max_columns=LIGER_MAX_COLUMNS
        ),
        _card("compile", "a formula, compiled by torch.compile", "compiled:CompiledAddNorm", finds_amax=True),
        _card("torch", "torch's addition, then the backend of norm", "norm:TorchAddNorm", multi_pass=True),
    ],
    "activation": [
        _card(
            "triton", "Triton's kernels of this package, which find an amax for FP8", "activation:TritonActivation",
            ("swiglu",), dtypes=("bfloat16", "float32"), finds_amax=True,
        ),
        _card("te", "Transformer Engine's kernels", "te:TEActivation", ("gelu_tanh", "swiglu", "geglu")),
        _card("liger", "Liger's kernel", "liger:LigerActivation", ("swiglu",), max_columns=LIGER_MAX_COLUMNS),
        _card("compile", "a formula, compiled by torch.compile", "compiled:CompiledActivation", finds_amax=True),
        _card(
            "torch", "torch's operators", "activation:TorchActivation",
            multi_pass=("swiglu", "geglu", "clamped_swiglu"),
        ),
    ],
    "cross_entropy": [
        _card(
            "triton", "a Triton kernel each for sums and gradient", "cross_entropy:TritonCrossEntropy",
            dtypes=KERNEL_DTYPES, logit_softcap=False,
        ),
        _card("compile", "a kernel each for sums and gradient, by torch.compile", "compiled:CompiledCrossEntropy"),
        _card("torch", "torch's operators, over blocks of tokens", "cross_entropy:TorchCrossEntropy", multi_pass=True),
    ],
    "wgrad": [
        _card("addmm", "torch's GEMM of bf16 operands into fp32", "wgrad:AddmmWgrad", dtypes=("bfloat16",)),
        _card("te", "Transformer Engine's GEMM", "wgrad:TEWgrad", dtypes=("bfloat16",)),
        _card(
            "torch", "torch's operators: in bf16 a GEMM, then an addition", "wgrad:TorchWgrad", multi_pass=("bfloat16",)
        ),
    ],
    "optimizer": [
        _card("apex", "NVIDIA Apex's kernels of LAMB", "apex:ApexOptimizer", ("lamb",)),
        _card("triton", "a Triton kernel of AdamW", "optimizer:TritonOptimizer", ("adamw",)),
        _card("torch", "torch's fused kernels", "optimizer:TorchOptimizer", multi_pass=("adamw",)),
    ],
}  # fmt: skip

BACKENDS = {name: Registry(f"{name} backend", f"megascale.backends.{name}", cards) for name, cards in _CARDS.items()}
"""Registries of backends, by the operation's key in `[backends]`."""

FUSIBLE_OPERATIONS = ("norm", "add_norm", "activation", "rope")
"""Operations fused by torch.compile with their neighbours in a block."""
