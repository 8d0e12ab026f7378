"""The parts that a transformer is put together from: norms, activations, position encodings."""

from megascale.core.registry import Card, Registry

NORMS = Registry(
    "norm",
    "megascale.norms",
    [
        Card("layernorm", "LayerNorm with gain and bias", "megascale.ops.norm:layer_norm", {"bias": True}),
        Card("rmsnorm", "RMSNorm with gain (Zhang and Sennrich 2019)", "megascale.ops.norm:rms_norm", {"bias": False}),
    ],
)

ACTIVATIONS = Registry(
    "activation",
    "megascale.activations",
    [
        Card("gelu", "GELU, exact", "megascale.ops.activation:gelu", {"gated": False}),
        Card(
            "gelu_tanh", "GELU, tanh approximation, as in GPT-2", "megascale.ops.activation:gelu_tanh", {"gated": False}
        ),
        Card("swiglu", "SiLU(gate) * up (Shazeer 2020)", "megascale.ops.activation:swiglu", {"gated": True}),
    ],
)
