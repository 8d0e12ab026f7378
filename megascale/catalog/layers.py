"""Layers of a transformer: the registries `BLOCKS`, `ATTENTIONS`, `NORMS`, `ACTIVATIONS`, `ROUTER_SCORES` and
`ROPE_SCALINGS`.

Facts of a block: `description`, a function of (model, layer) that lists the parts of the block (`layout.blocks`);
`operations`, the optional operations of `catalog.backends` used by the block; `shares_casts`, attention and MLP share
FP8 operands. Facts of a kind of attention: `letter`, its name in `model.attention_pattern`; `description`, a function
of (model, layer) that lists the parts of the branch, and `operations`, as of a block; `carries_state`, a state of
earlier tokens takes the place of their keys. Facts of a norm: `bias`; `mean`, i.e. the mean is subtracted; `offset`,
the constant added to the stored gain, which starts as 1 - offset. Facts of an activation: `gated`, i.e. with an input
of twice the width. Facts of a scaling of rotary embeddings for sequences longer than in pretraining: `required` and
`optional`, the keys of `model.rope_scaling` beside `type`, with their types. A block with the fact `steps` is a
`model.block.SteppedBlock`.
"""

from megascale.core.registry import Card, Registry


def _block(name: str, help: str, target: str, operations: tuple[str, ...] = (), shares_casts: bool = False) -> Card:
    description = f"megascale.layout.blocks:{name}_block"
    facts = {"description": description, "operations": operations, "shares_casts": shares_casts, "steps": True}
    return Card(name, help, f"megascale.model.block:{target}", facts)


def _attention(
    name: str, letter: str, help: str, target: str, description: str, operations: tuple[str, ...],
    carries_state: bool = False,
) -> Card:  # fmt: skip
    facts = {"letter": letter, "description": f"megascale.layout.{description}", "operations": operations,
             "carries_state": carries_state}  # fmt: skip
    return Card(name, help, f"megascale.model.{target}", facts)


def _norm(name: str, help: str, function: str, *, bias: bool = False, mean: bool = False, offset: float = 0.0) -> Card:
    return Card(name, help, f"megascale.ops.norm:{function}", {"bias": bias, "mean": mean, "offset": offset})


def _activation(name: str, help: str, *, gated: bool = False) -> Card:
    return Card(name, help, f"megascale.ops.activation:{name}", {"gated": gated})


BLOCKS = Registry(
    "block",
    "megascale.blocks",
    [
        _block("serial", "attention, then MLP, each after a norm: GPT-2 and Llama", "SerialBlock", ("add_norm",)),
        _block(
            "parallel", "attention and MLP in parallel, after one norm, with half the tp collectives (MegaScale 3.1)",
            "ParallelBlock", shares_casts=True,
        ),
        _block(
            "parallel_two_norms", "attention and MLP in parallel, each after a norm of its own: GPT-NeoX",
            "ParallelTwoNormsBlock", shares_casts=True,
        ),
        _block(
            "sandwich", "serial, with a norm before and after each branch: Gemma 2 and 3", "SandwichBlock",
            ("add_norm",),
        ),
        _block("post_norm", "serial, with a norm after each branch and none before: OLMo 2", "PostNormBlock"),
        _block(
            "fog", "post_norm with gains that start at 1 / sqrt(num_layers) (FOG, Hernandez-Cano et al. 2025)",
            "PostNormBlock",
        ),
    ],
)  # fmt: skip

ATTENTIONS = Registry(
    "kind of attention",
    "megascale.attentions",
    [
        _attention("softmax", "S", "softmax attention, latent with kv_lora_rank", "latent_attention:softmax_attention",
                   "blocks:softmax_branch", ("attention", "partial_attention", "rope")),
        _attention("lightning", "L", "linear attention with a decay by head (MiniMax-01, Li et al. 2025)",
                   "lightning_attention:LightningAttention", "parts.linear_attention:lightning_branch",
                   (), carries_state=True),
    ],
    facts={"letter": "", "description": "", "operations": (), "carries_state": False},
)  # fmt: skip

NORMS = Registry(
    "norm",
    "megascale.norms",
    [
        _norm("layernorm", "LayerNorm with gain and bias", "layer_norm", bias=True, mean=True),
        _norm("rmsnorm", "RMSNorm with gain (Zhang and Sennrich 2019)", "rms_norm"),
        _norm("rmsnorm_1p", "RMSNorm with gain 1 + w, w initially zero: Gemma", "rms_norm_1p", offset=1.0),
    ],
    synonyms={
        "layer_norm": "layernorm", "t5layernorm": "rmsnorm", "rms": "rmsnorm", "zero_centered_rmsnorm": "rmsnorm_1p",
    },
)  # fmt: skip

ACTIVATIONS = Registry(
    "activation",
    "megascale.activations",
    [
        _activation("gelu", "GELU, exact"),
        _activation("gelu_tanh", "GELU, tanh approximation, as in GPT-2"),
        _activation("swiglu", "SiLU(gate) * up (Shazeer 2020)", gated=True),
        _activation("geglu", "GELU(gate) * up, tanh approximation: Gemma", gated=True),
        _activation(
            "clamped_swiglu", "gate * sigmoid(1.702 gate) * (up + 1), gate <= 7, |up| <= 7: gpt-oss", gated=True
        ),
    ],
    synonyms={
        "silu": "swiglu", "swish": "swiglu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "",
        "swigluoai": "clamped_swiglu", "relu2": "", "squared_relu": "", "reglu": "", "quick_gelu": "",
    },
)  # fmt: skip

ROUTER_SCORES = Registry(
    "router score",
    "megascale.router_scores",
    [
        Card("softmax", "softmax over all experts", "megascale.ops.routing:softmax"),
        Card("sigmoid", "sigmoid of each logit (DeepSeek-V3)", "megascale.ops.routing:sigmoid"),
        Card("sqrt_softplus", "square root of the softplus of each logit", "megascale.ops.routing:sqrt_softplus"),
    ],
    synonyms={"sqrtsoftplus": "sqrt_softplus"},
)

_YARN = {
    "beta_fast": float, "beta_slow": float, "attention_factor": float, "mscale": float, "mscale_all_dim": float,
    "truncate": bool,
}  # fmt: skip

ROPE_SCALINGS = Registry(
    "rope scaling",
    "megascale.rope_scalings",
    [
        Card(
            "linear",
            "positions divided by factor (Chen et al. 2023)",
            "megascale.ops.rope_scaling:linear",
            {"required": {"factor": float}, "optional": {}},
        ),
        Card(
            "dynamic",
            "a base that grows with the sequence beyond original_seq_length, by default seq_length (NTK-aware)",
            "megascale.ops.rope_scaling:dynamic",
            {"required": {"factor": float}, "optional": {"original_seq_length": int}},
        ),
        Card(
            "llama3",
            "low frequencies divided by factor, high frequencies kept: low_freq_factor, high_freq_factor, "
            "original_seq_length (Llama 3.1)",
            "megascale.ops.rope_scaling:llama3",
            {
                "required": {
                    "factor": float, "low_freq_factor": float, "high_freq_factor": float, "original_seq_length": int
                },
                "optional": {},
            },
        ),
        Card(
            "yarn",
            "as llama3, on a ramp of dimensions, and q and k multiplied: factor, original_seq_length and optionally "
            f"{', '.join(_YARN)} (Peng et al. 2023)",
            "megascale.ops.rope_scaling:yarn",
            {"required": {"factor": float, "original_seq_length": int}, "optional": _YARN},
        ),
    ],
)  # fmt: skip
