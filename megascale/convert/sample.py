"""Text from a checkpoint, through transformers: to see what was learnt."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint import manifest, whole
from megascale.checkpoint.storage import Location
from megascale.convert.conversion import to_huggingface
from megascale.convert.huggingface import CONFIG, Pretrained
from megascale.core.errors import CheckpointError, MegascaleError
from megascale.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Wish:
    """What to write. `tokens`: how many at most. `temperature`: 0 for the likeliest token always; `top_k`: of how many
    of the likeliest one is drawn, 0 for all.
    """

    tokens: int
    temperature: float
    top_k: int
    seed: int


def sample(
    source: Location, prompts: Sequence[str], wish: Wish, tokenizer: str | None, device: torch.device
) -> Iterator[str]:
    """Each prompt with what follows it. `source`: a checkpoint, or a folder of Hugging Face's; `tokenizer`: None for
    the one that it was trained with.

    Raises: CheckpointError, DataError; MegascaleError without transformers
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise MegascaleError(f"sampling needs transformers: {error}", mend="pip install transformers") from None
    with tempfile.TemporaryDirectory() as temporary:
        folder = source.local
        if folder is None or not (folder / CONFIG).is_file():
            folder = Path(temporary) / "model"
            to_huggingface(source, folder)
        text = load_tokenizer(tokenizer or _tokenizer_of(source))
        given = Pretrained(folder)
        given.check()  # transformers draws at random what is not there
        room = given.model.seq_length
        disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        model.to(device)
    for prompt in prompts:
        yield _continued(model, text, prompt, wish, room)


def _continued(model: Any, text: Tokenizer, prompt: str, wish: Wish, room: int) -> str:
    start = text.encode([prompt])[0].tolist() or [text.eod]
    if len(start) >= room:
        raise MegascaleError(f"a prompt of {len(start)} tokens leaves no room in {room}", mend="a shorter prompt")
    words = model.get_input_embeddings().weight.shape[0]
    if max(start) >= words:
        what = f"the prompt has token {max(start)}, and the model knows {words}"
        raise MegascaleError(what, mend="the tokenizer that it was trained with: --tokenizer FILE")
    ids = torch.tensor([start], device=next(model.parameters()).device)
    torch.manual_seed(wish.seed)
    draw = {"temperature": wish.temperature, "top_k": wish.top_k} if wish.temperature else {}
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(wish.tokens, room - len(start)),
        do_sample=bool(wish.temperature), eos_token_id=text.eod, pad_token_id=text.eod, **draw,
    )  # fmt: skip
    found = made[0].tolist()
    return text.decode(found[: -1 if found[-1] == text.eod else None])


def _tokenizer_of(source: Location) -> str:
    """The tokenizer beside weights, or that a run was configured with."""
    if source.local and (source.local / "tokenizer.json").is_file():
        return str(source.local / "tokenizer.json")
    found = None
    if (source / manifest.NAME).exists():
        found = (manifest.read(source).facts.config.get("data") or {}).get("tokenizer")
    if not found:
        raise CheckpointError(f"{source} does not say its tokenizer", mend="--tokenizer FILE")
    return str(found)


def find(path: Location) -> Location:
    """What a path names: a folder of Hugging Face's, a checkpoint, or the newest of a run.

    Raises: CheckpointError if it is none
    """
    return path if path.local and (path.local / CONFIG).is_file() else whole.find(path)
