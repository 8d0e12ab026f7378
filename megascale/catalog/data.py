"""Names in `[data]`: the registries `DATA_POLICIES`, `SAMPLE_WEIGHTS` and `TOKENIZERS`.

A data policy changes the weights of a blend during training; its fact is `uses_losses`, the losses by dataset. A sample
weight is that of a training sample in the loss. A tokenizer has no file; other names are paths to a `tokenizer.json` of
Hugging Face's `tokenizers`.
"""

from megascale.core.registry import Card, Registry

DATA_POLICIES = Registry(
    "data policy",
    "megascale.data_policies",
    [
        Card(
            "fixed",
            "leaves the weights as they are, such as those that another policy has found",
            "megascale.data.mix.data_policy:Fixed",
            {"uses_losses": False},
        ),
    ],
    synonyms={"none": "fixed", "static": "fixed"},
)

SAMPLE_WEIGHTS = Registry(
    "sample weight",
    "megascale.sample_weights",
    [Card("equal", "all samples alike", "megascale.data.mix.label_weights:equal")],
    synonyms={"none": "equal", "uniform": "equal"},
)

TOKENIZERS = Registry(
    "tokenizer",
    "megascale.tokenizers",
    [
        Card(
            "bytes",
            "a token per byte of UTF-8, and an end-of-document token",
            "megascale.data.prepare.tokenizer:ByteTokenizer",
        )
    ],
)
