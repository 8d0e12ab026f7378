"""Text generation from a checkpoint, with the transformers library."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale.convert.conversion import to_huggingface
from megascale.convert.huggingface import PretrainedWeights, weights_folder
from megascale.convert.tokenizer_files import FramedTokenizer, load_framed
from megascale.core.errors import CheckpointError, MegascaleError
from megascale.core.storage import Location


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. `temperature`: 0 for greedy decoding. `top_k`: number of likeliest tokens to sample from; 0
    for all. `tokenizer`, `eod`: a tokenizer's name or file, and its end-of-document token; None for those of the
    weights.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    seed: int
    tokenizer: str | None = None
    eod: str | None = None


def generate_text(
    source: Location, prompts: Sequence[str], params: SamplingParams, device: torch.device, average: bool = False
) -> Iterator[str]:
    """Yield every prompt with its continuation. `source`: a checkpoint, or a Hugging Face folder. `average`: by the
    average of a checkpoint's weights.

    Raises: CheckpointError, DataError; MegascaleError without transformers
    """
    try:
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise MegascaleError(f"sampling needs transformers: {error}", hint="pip install transformers") from None
    with tempfile.TemporaryDirectory() as temporary:
        if (folder := weights_folder(source.local_path)) is None:
            folder = Path(temporary) / "model"
            to_huggingface(source, folder, average=average)
        elif average:
            raise CheckpointError(f"{source} has no average of the weights", hint="leave out --average")
        frame = load_framed(source, folder, params.tokenizer, params.eod)
        pretrained = PretrainedWeights(folder)
        pretrained.check_tensors()  # transformers would initialize missing tensors randomly
        seq_length = pretrained.model.seq_length
        disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        model.generation_config = GenerationConfig()  # the file's penalties and top_p are not what the user asked for
        model.to(device)
    for prompt in prompts:
        yield _generate_one(model, frame, prompt, params, seq_length)


def _generate_one(model: Any, frame: FramedTokenizer, prompt: str, params: SamplingParams, seq_length: int) -> str:
    tokenizer = frame.tokenizer
    before = [] if frame.bos is None else [frame.bos]
    prompt_ids = before + tokenizer.encode([prompt])[0].tolist() or [tokenizer.eod]
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
    max_new_tokens = min(params.max_new_tokens, seq_length - len(prompt_ids))
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
        do_sample=bool(params.temperature), eos_token_id=frame.stop, pad_token_id=frame.stop[0], **sampling,
    )  # fmt: skip
    token_ids = output[0].tolist()
    return tokenizer.decode(token_ids[len(before) : -1 if token_ids[-1] in frame.stop else None])
