"""Tokenizers that need no file. Any other name is the path of a `tokenizer.json` of Hugging Face's `tokenizers`."""

from megascale.core.registry import Card, Registry

TOKENIZERS = Registry(
    "tokenizer",
    "megascale.tokenizers",
    [
        Card(
            "bytes",
            "a token for each byte of UTF-8, and one that ends a document",
            "megascale.data.tokenizer:ByteTokenizer",
        )
    ],
)
