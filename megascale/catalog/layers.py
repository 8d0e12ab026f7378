"""Layers of a transformer: the registries `BLOCKS`, `NORMS` and `ACTIVATIONS`.

Facts of a block: `description`, a function of (model, layer) that lists the parts of the block (`layout.blocks`);
`operations`, the optional operations of `catalog.backends` used by the block. Of a norm: `bias`. Of an activation:
`gated`, i.e. with an input of twice the width.
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
            {"description": "megascale.layout.blocks:serial_block", "operations": ("add_norm",)},
        ),
        Card(
            "parallel",
            "attention and MLP in parallel, after one norm (MegaScale 3.1)",
            "megascale.model.block:ParallelBlock",
            {"description": "megascale.layout.blocks:parallel_block", "operations": ()},
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
