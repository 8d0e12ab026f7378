"""Tokenizers without a file. Other names are paths to a `tokenizer.json` of Hugging Face's `tokenizers`."""

from megascale.core.registry import Card, Registry

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
