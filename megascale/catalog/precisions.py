"""Training precisions: the dtypes of compute and accumulation. Byte counts are per parameter."""

from megascale.core.registry import Card, Registry


def _card(
    name: str, help: str, compute: str, accumulate: str, compute_bytes: int, accumulate_bytes: int,
    quantizes: bool = False,
) -> Card:  # fmt: skip
    facts = {
        "compute_dtype": compute,  # weights and activations
        "accumulate_dtype": accumulate,  # main gradients, optimizer state, loss, master weights
        "compute_bytes": compute_bytes,
        "accumulate_bytes": accumulate_bytes,
        "quantizes": quantizes,  # linear layers of blocks run the GEMMs of a recipe (`catalog.recipes`)
        "master_weights": compute != accumulate,  # the optimizer updates a separate copy of the weights
    }
    return Card(name, help, "torch:" + compute, facts)


PRECISIONS = Registry(
    "precision",
    "megascale.precisions",
    [
        _card("fp32", "everything in fp32", "float32", "float32", 4, 4),
        _card(
            "bf16", "compute in bfloat16; gradients, master weights and optimizer in fp32", "bfloat16", "float32", 2, 4
        ),
        _card(
            "fp8", "as bf16, with FP8 GEMMs in the linear layers of blocks, see `[fp8]`", "bfloat16", "float32", 2, 4,
            quantizes=True,
        ),
        _card("fp64", "everything in fp64, to compare layouts", "float64", "float64", 8, 8),
    ],
    synonyms={
        "fp16": "bf16", "float16": "bf16", "half": "bf16", "16": "bf16", "16-mixed": "bf16", "fp16-mixed": "bf16",
        "bf16-mixed": "bf16", "bf16-true": "bf16", "bfloat16": "bf16", "amp": "bf16", "float32": "fp32",
        "single": "fp32", "32": "fp32", "32-true": "fp32", "tf32": "fp32", "float64": "fp64", "double": "fp64",
        "float8": "fp8", "e4m3": "fp8", "hybrid": "fp8", "mxfp8": "fp8", "transformer-engine": "fp8", "fp4": "fp8",
        "nvfp4": "fp8", "int8": "",
    },
)  # fmt: skip
