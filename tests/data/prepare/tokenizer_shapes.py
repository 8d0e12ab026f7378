"""Tiny tokenizers in the shapes of the families' tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    'Once upon a time, there were 1234567 tokens; they\'re in "quotes".',
    "def main(argv):\n    return  [x ** 2 for x in argv]\t# two  spaces\n\n",
    "Ünïcödé, 漢字かな交じり文, Ελληνικά, עברית, 🙂👩‍👩‍👧 and \u00a0 non-breaking\u2003spaces",
    " leading and trailing ",
    "e\u0301 and \u00e9 differ until they are normalized; ﬁ too",
]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
Shape = tuple[Tokenizer, dict[str, Any]]
"""A tokenizer, and its tokenizer_config.json."""


def _train(tokenizer: Tokenizer, specials: list[str], alphabet: list[str], size: int = 360) -> None:
    tokenizer.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False),
    )


def _byte_level(specials: list[str], split: str | None, normalizer: Any = None) -> Tokenizer:
    """Byte-level BPE. `split`: a regex in place of GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    parts = [pre_tokenizers.Split(Regex(split), "isolated"), level] if split else [level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, specials, pre_tokenizers.ByteLevel.alphabet())
    return tokenizer


def _begin(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    """Begin a model's input with `bos`."""
    id = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, id)])
    return tokenizer


def gpt_neox() -> Shape:
    """GPT-2, Pythia, SmolLM, OLMo 2: GPT-2's regex; runs of spaces as added tokens that are not special."""
    tokenizer = _byte_level(["<|endoftext|>", "<|padding|>"], None)
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in range(3, 6)])
    return tokenizer, {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}


def llama3() -> Shape:
    """Llama 3, Mistral-Nemo: a regex of their own, and a beginning of text."""
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer = _begin(_byte_level(specials, LLAMA3_SPLIT), specials[0])
    return tokenizer, {"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"}


def qwen() -> Shape:
    """Qwen 2 and 3: NFC, digits one by one, no beginning of text, an end of text apart from the end of a turn."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _byte_level(specials, QWEN_SPLIT, normalizers.NFC()), {"eos_token": "<|im_end|>", "bos_token": None}


def _byte_fallback(specials: list[str], normalizer: Any, decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoder
    _train(tokenizer, [*specials, *(f"<0x{byte:02X}>" for byte in range(256))], [], 390)
    facts = json.loads(tokenizer.to_str())
    facts["added_tokens"] = [token for token in facts["added_tokens"] if token["content"] in specials]
    return Tokenizer.from_str(json.dumps(facts))


def llama2() -> Shape:
    """Llama 2, Mistral 7B, Phi-3: SentencePiece's BPE with byte fallback, a space put before the text."""
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = _begin(_byte_fallback(["<unk>", "<s>", "</s>"], normalizer, decoders.Sequence(decoder)), "<s>")
    return tokenizer, {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}


def gemma() -> Shape:
    """Gemma: byte fallback without a space before the text; `</s>` is an HTML tag, and no special token."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = _byte_fallback(["<pad>", "<eos>", "<bos>", "<unk>"], normalizers.Replace(" ", "▁"), decoder)
    tokenizer.add_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return _begin(tokenizer, "<bos>"), {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}


def unigram() -> Shape:
    """SentencePiece's unigram model."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer, {"eos_token": "</s>", "unk_token": "<unk>"}


SHAPES: dict[str, Callable[[], Shape]] = {
    shape.__name__: shape for shape in (gpt_neox, llama3, qwen, llama2, gemma, unigram)
}


def save_shape(name: str, folder: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json. Returns the former."""
    tokenizer, keys = SHAPES[name]()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | keys)
    (folder / "tokenizer_config.json").write_text(text)
    return folder / "tokenizer.json"
