"""The parts that a transformer is put together from: blocks, norms, activations.

Facts of a block: `description`, the function of (model, layer) that lists its parts (`layout.blocks`); `operations`,
what it uses of the operations that not every block has (`catalog.backends`).
"""

from megascale.core.registry import Card, Registry

BLOCKS = Registry(
    "block",
    "megascale.blocks",
    [
        Card(
            "serial",
            "attention, then MLP: GPT-2 and Llama",
            "megascale.model.block:SerialBlock",
            {"description": "megascale.layout.blocks:serial", "operations": ("add_norm",)},
        ),
        Card(
            "parallel",
            "attention and MLP side by side from one norm (MegaScale 3.1)",
            "megascale.model.block:ParallelBlock",
            {"description": "megascale.layout.blocks:parallel", "operations": ()},
        ),
    ],
)

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
