"""Text generation from a checkpoint, with the transformers library."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.checkpoint.storage import Location
from megascale.convert.conversion import to_huggingface
from megascale.convert.huggingface import CONFIG_FILE, PretrainedWeights
from megascale.core.errors import CheckpointError, MegascaleError
from megascale.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. `temperature`: 0 for greedy decoding. `top_k`: number of likeliest tokens to sample from; 0
    for all.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    seed: int


def generate_text(
    source: Location, prompts: Sequence[str], params: SamplingParams, tokenizer: str | None, device: torch.device
) -> Iterator[str]:
    """Yield every prompt with its continuation. `source`: a checkpoint, or a Hugging Face folder. `tokenizer`: a name
    or file; None for the tokenizer of `source`.

    Raises: CheckpointError, DataError; MegascaleError without transformers
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise MegascaleError(f"sampling needs transformers: {error}", hint="pip install transformers") from None
    with tempfile.TemporaryDirectory() as temporary:
        folder = source.local_path
        if folder is None or not (folder / CONFIG_FILE).is_file():
            folder = Path(temporary) / "model"
            to_huggingface(source, folder)
        loaded_tokenizer = load_tokenizer(tokenizer or _tokenizer_of(source))
        pretrained = PretrainedWeights(folder)
        pretrained.check_tensors()  # transformers would initialize missing tensors randomly
        seq_length = pretrained.model.seq_length
        disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        model.to(device)
    for prompt in prompts:
        yield _generate_one(model, loaded_tokenizer, prompt, params, seq_length)


def _generate_one(model: Any, tokenizer: Tokenizer, prompt: str, params: SamplingParams, seq_length: int) -> str:
    prompt_ids = tokenizer.encode([prompt])[0].tolist() or [tokenizer.eod]
    if len(prompt_ids) >= seq_length:
        what = f"a prompt of {len(prompt_ids)} tokens fills the sequence of {seq_length}"
        raise MegascaleError(what, hint="a shorter prompt")
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if max(prompt_ids) >= vocab_size:
        what = f"the prompt has token {max(prompt_ids)}, but the model's vocabulary has {vocab_size}"
        raise MegascaleError(what, hint="the tokenizer that the model was trained with: --tokenizer FILE")
    ids = torch.tensor([prompt_ids], device=next(model.parameters()).device)
    torch.manual_seed(params.seed)
    sampling = {"temperature": params.temperature, "top_k": params.top_k} if params.temperature else {}
    eod, max_new_tokens = tokenizer.eod, min(params.max_new_tokens, seq_length - len(prompt_ids))
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
        do_sample=bool(params.temperature), eos_token_id=eod, pad_token_id=eod, **sampling,
    )  # fmt: skip
    token_ids = output[0].tolist()
    return tokenizer.decode(token_ids[: -1 if token_ids[-1] == eod else None])


def _tokenizer_of(source: Location) -> str:
    """The tokenizer.json beside the weights, or the tokenizer of the run's configuration."""
    if source.local_path and (source.local_path / "tokenizer.json").is_file():
        return str(source.local_path / "tokenizer.json")
    tokenizer = None
    if (source / manifest.NAME).exists():
        tokenizer = (manifest.read(source).facts.config.get("data") or {}).get("tokenizer")
    if not tokenizer:
        raise CheckpointError(f"{source} does not name its tokenizer", hint="--tokenizer FILE")
    return str(tokenizer)


def find_weights(path: Location) -> Location:
    """Resolve a path: a Hugging Face folder, a checkpoint, or a run, which stands for its newest checkpoint.

    Raises: CheckpointError if the path has no weights
    """
    return path if path.local_path and (path.local_path / CONFIG_FILE).is_file() else offline.find_checkpoint(path)
