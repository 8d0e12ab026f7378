"""Layers of a transformer: the registries `BLOCKS`, `NORMS` and `ACTIVATIONS`.

Facts of a block: `description`, a function of (model, layer) that lists the parts of the block (`layout.blocks`);
`operations`, the optional operations of `catalog.backends` used by the block; `shares_casts`, attention and MLP share
FP8 operands. Facts of a norm: `bias`; `mean`, i.e. the mean is subtracted; `offset`, the constant added to the stored
gain, which starts as 1 - offset. Facts of an activation: `gated`, i.e. with an input of twice the width.
"""

from megascale.core.registry import Card, Registry

BLOCKS = Registry(
    "block",
    "megascale.blocks",
    [
        Card(
            "serial",
            "attention, then MLP, each after a norm: GPT-2 and Llama",
            "megascale.model.block:SerialBlock",
            {"description": "megascale.layout.blocks:serial_block", "operations": ("add_norm",), "shares_casts": False},
        ),
        Card(
            "parallel",
            "attention and MLP in parallel, after one norm, with half the tp collectives (MegaScale 3.1)",
            "megascale.model.block:ParallelBlock",
            {"description": "megascale.layout.blocks:parallel_block", "operations": (), "shares_casts": True},
        ),
        Card(
            "parallel_two_norms",
            "attention and MLP in parallel, each after a norm of its own: GPT-NeoX",
            "megascale.model.block:ParallelTwoNormsBlock",
            {"description": "megascale.layout.blocks:parallel_two_norms_block", "operations": (), "shares_casts": True},
        ),
        Card(
            "sandwich",
            "serial, with a norm before and after each branch: Gemma 2 and 3",
            "megascale.model.block:SandwichBlock",
            {
                "description": "megascale.layout.blocks:sandwich_block",
                "operations": ("add_norm",),
                "shares_casts": False,
            },
        ),
        Card(
            "post_norm",
            "serial, with a norm after each branch and none before: OLMo 2",
            "megascale.model.block:PostNormBlock",
            {"description": "megascale.layout.blocks:post_norm_block", "operations": (), "shares_casts": False},
        ),
    ],
)

NORMS = Registry(
    "norm",
    "megascale.norms",
    [
        Card(
            "layernorm",
            "LayerNorm with gain and bias",
            "megascale.ops.norm:layer_norm",
            {"bias": True, "mean": True, "offset": 0.0},
        ),
        Card(
            "rmsnorm",
            "RMSNorm with gain (Zhang and Sennrich 2019)",
            "megascale.ops.norm:rms_norm",
            {"bias": False, "mean": False, "offset": 0.0},
        ),
        Card(
            "rmsnorm_1p",
            "RMSNorm with gain 1 + w, w initially zero: Gemma",
            "megascale.ops.norm:rms_norm_1p",
            {"bias": False, "mean": False, "offset": 1.0},
        ),
    ],
    synonyms={
        "layer_norm": "layernorm",
        "t5layernorm": "rmsnorm",
        "rms": "rmsnorm",
        "zero_centered_rmsnorm": "rmsnorm_1p",
    },
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
        Card(
            "geglu",
            "GELU(gate) * up, tanh approximation: Gemma",
            "megascale.ops.activation:geglu",
            {"gated": True},
        ),
    ],
    synonyms={
        "silu": "swiglu",
        "swish": "swiglu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "",
        "relu2": "",
        "squared_relu": "",
        "reglu": "",
        "quick_gelu": "",
    },
)
