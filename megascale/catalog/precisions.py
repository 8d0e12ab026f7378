"""Number formats of training. Byte counts are for each parameter; gradients accumulate in `accumulate`."""

from megascale.core.registry import Card, Registry


def _card(
    name: str, help: str, compute: str, accumulate: str, compute_bytes: int, accumulate_bytes: int, cast_bytes: int = 0
) -> Card:
    facts = {
        "compute": compute,  # weights and activations
        "accumulate": accumulate,  # gradients, optimizer state, loss, and the weights that the optimizer updates
        "compute_bytes": compute_bytes,
        "accumulate_bytes": accumulate_bytes,
        "cast_bytes": cast_bytes,  # of the copies, in another format, that products read of a weight
        "master": compute != accumulate,  # the optimizer keeps its own copy of the weights
    }
    return Card(name, help, "torch:" + compute, facts)


PRECISIONS = Registry(
    "precision",
    "megascale.precisions",
    [
        _card("fp32", "everything in 32 bits", "float32", "float32", 4, 4),
        _card(
            "bf16", "compute in bfloat16; gradients, master weights and optimizer in fp32", "bfloat16", "float32", 2, 4
        ),
        _card(
            "fp8",
            "as bf16, but the linear layers of blocks multiply in 8 bits, see `[fp8]`",
            "bfloat16",
            "float32",
            2,
            4,
            2,
        ),
        _card("fp64", "everything in 64 bits: for checking layouts against each other", "float64", "float64", 8, 8),
    ],
)
