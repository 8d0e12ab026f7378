"""Who carries out an operation: for each, the implementations that can be asked for, the best first."""

from megascale.core.registry import Card, Registry

AUTO = "auto"
"""The first backend of an operation that is present and can serve."""

FORMATS = ("float32", "bfloat16")
"""Of torch, in which libraries have kernels."""


def _card(name: str, help: str, body: str, serves: tuple[str, ...] | None = None) -> Card:
    """Of a norm or an activation; `serves`: those that a library has, in FORMATS; None for all, in all."""
    return Card(name, help, f"megascale.ops.{body}", {"serves": serves, "formats": serves and FORMATS})


def lacks(card: Card, name: str, number_format: str) -> str | None:
    """What of a norm or activation `name` in one of torch's formats a backend lacks, None if nothing."""
    for fact, needed in (("serves", name), ("formats", number_format)):
        if card.facts.get(fact) and needed not in card.facts[fact]:
            return f"has no {needed}"
    return None


NORM_BACKENDS = Registry(
    "norm backend",
    "megascale.backends.norm",
    [
        _card("te", "Transformer Engine's kernels", "te:TENorm", ("layernorm", "rmsnorm")),
        _card("liger", "Liger's kernels", "liger:LigerNorm", ("layernorm", "rmsnorm")),
        _card("apex", "Apex's kernels", "apex_norm:ApexNorm", ("layernorm", "rmsnorm")),
        _card("compile", "a formula by torch.compile", "compiled:CompiledNorm"),
        _card("torch", "torch's operators", "norm:TorchNorm"),
    ],
)

ACTIVATION_BACKENDS = Registry(
    "activation backend",
    "megascale.backends.activation",
    [
        _card("te", "Transformer Engine's kernels", "te:TEActivation", ("gelu_tanh", "swiglu")),
        _card("liger", "Liger's kernel", "liger:LigerActivation", ("swiglu",)),
        _card("compile", "a formula by torch.compile", "compiled:CompiledActivation"),
        _card("torch", "torch's operators", "activation:TorchActivation"),
    ],
)

ATTENTION_BACKENDS = Registry(
    "attention backend",
    "megascale.backends.attention",
    [
        Card("flash", "flash-attn (Dao 2023)", "megascale.ops.flash:FlashAttention"),
        Card("te", "Transformer Engine's DotProductAttention", "megascale.ops.te_attention:EngineAttention"),
        Card(
            "compile", "torch's FlexAttention, compiled, for layers with a window", "megascale.ops.flex:FlexAttention"
        ),
        Card("torch", "torch's scaled_dot_product_attention", "megascale.ops.attention:TorchAttention"),
    ],
)

OPTIMIZER_BACKENDS = Registry(
    "optimizer backend",
    "megascale.backends.optimizer",
    [
        Card("apex", "NVIDIA Apex's multi-tensor kernels", "megascale.ops.apex:ApexOptimizer"),
        Card("torch", "torch's fused kernels", "megascale.ops.optimizer:TorchOptimizer"),
    ],
)

LINEAR_BACKENDS = Registry(
    "linear backend",
    "megascale.backends.linear",
    [
        Card("te", "Transformer Engine's products in fp8, and its casts", "megascale.ops.te_linear:EngineLinear"),
        Card("compile", "torch's products; casts to fp8 by torch.compile", "megascale.ops.fp8:CompiledLinear"),
        Card("torch", "torch's products; casts to fp8 by torch's operators", "megascale.ops.fp8:TorchLinear"),
    ],
)

CROSS_ENTROPY_BACKENDS = Registry(
    "cross-entropy backend",
    "megascale.backends.cross_entropy",
    [
        Card("te", "Transformer Engine's kernels", "megascale.ops.cross_entropy:TransformerEngineCrossEntropy"),
        Card("compile", "torch.compile", "megascale.ops.cross_entropy:CompiledCrossEntropy"),
        Card("torch", "torch's operators, over blocks of tokens", "megascale.ops.cross_entropy:TorchCrossEntropy"),
    ],
)

FUSED = ("norm", "activation")
"""Operations that torch.compile fuses with what stands beside them in a block."""

BACKENDS: dict[str, Registry] = {
    "linear": LINEAR_BACKENDS,
    "attention": ATTENTION_BACKENDS,
    "norm": NORM_BACKENDS,
    "activation": ACTIVATION_BACKENDS,
    "cross_entropy": CROSS_ENTROPY_BACKENDS,
    "optimizer": OPTIMIZER_BACKENDS,
}
"""The registry of each operation, by its key in `[backends]`."""
