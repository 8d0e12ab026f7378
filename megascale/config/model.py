"""The network: sizes and parts of a decoder-only transformer."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from megascale.catalog.layers import ACTIVATIONS, BLOCKS, NORMS
from megascale.catalog.presets import PRESETS
from megascale.config.section import Count, Section, choice
from megascale.core.registry import nearest

FOLLOWS = {"num_kv_heads": "num_heads", "ffn_size": "hidden_size"}
"""Sizes that, left out, follow from another."""

Window = Annotated[int, Field(ge=0, le=2**40)]


def _known_preset(name: str) -> str:
    if name not in PRESETS:
        context = {"message": f"'{name}' is not one of {', '.join(PRESETS)}", "nearest": nearest(name, PRESETS)}
        raise PydanticCustomError("choice", "{message}", context)
    return name


class ModelConfig(Section):
    """`[model]`: a preset, sizes, or a preset with some sizes changed."""

    preset: Annotated[str, AfterValidator(_known_preset)] | None = Field(
        None, description="a named model whose keys fill in for those left out"
    )
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = Field(description="transformer blocks")
    hidden_size: Count = Field(description="width of the residual stream")
    num_heads: Count = Field(description="attention heads")
    num_kv_heads: Count = Field(
        description="heads of keys and values, shared by groups of query heads; default num_heads"
    )
    ffn_size: Count = Field(
        description="inner width of the MLP; default 4 x hidden_size, or for a gated activation 8/3 x hidden_size "
        "rounded up to a multiple of 64"
    )
    vocab_size: Count = Field(description="tokens in the vocabulary, without padding")
    seq_length: Count = Field(description="tokens in a sample")
    norm: Annotated[str, choice(NORMS)] = Field("layernorm", description="normalisation before each branch")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance in a norm")
    activation: Annotated[str, choice(ACTIVATIONS)] = Field("gelu", description="non-linearity of the MLP")
    position: Literal["learned", "rope"] = Field(
        "learned", description="learned position vectors, or rotary embeddings"
    )
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    bias: bool = Field(True, description="biases in linear layers")
    tie_embeddings: bool = Field(True, description="the output projection shares the weight of the token embedding")
    block: Annotated[str, choice(BLOCKS)] = Field(
        "serial", description="attention then MLP, or parallel: both from one norm, which halves the collectives of tp"
    )
    window: Window | Annotated[list[Window], Field(min_length=1)] | None = Field(
        None,
        description="sliding-window attention: how many keys a query sees, its own and those just before; a list "
        "repeats over the layers; 0: the whole past",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability of dropping: embeddings, attention weights, and both branches"
    )
    init_std: float = Field(
        0.02,
        gt=0,
        description="standard deviation of initial weights; projections back into the residual stream get "
        "init_std / sqrt(2 x num_layers)",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        return fill_in(given) if isinstance(given, dict) else given

    def __hash__(self) -> int:
        return hash((self.num_layers, self.hidden_size, self.seq_length))  # `window` may be a list, which has no hash

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer how many keys a query sees, its own among them; None: its whole past."""
        given = self.window if isinstance(self.window, list) else [self.window or 0]
        return _windows(tuple(given), self.seq_length, self.num_layers)

    @property
    def gated(self) -> bool:
        return bool(ACTIVATIONS[self.activation].facts["gated"])


@lru_cache
def _windows(pattern: tuple[int, ...], seq_length: int, num_layers: int) -> tuple[int | None, ...]:
    seen = [window if 0 < window < seq_length else None for window in pattern]
    return tuple(itertools.islice(itertools.cycle(seen), num_layers))


def fill_in(given: dict[str, Any]) -> dict[str, Any]:
    """`given` with the keys of its preset and the sizes that follow from others."""
    name = given.get("preset")
    full = PRESETS.get(name if isinstance(name, str) else "", {}) | given
    hidden, heads = full.get("hidden_size"), full.get("num_heads")
    if "num_kv_heads" not in full and isinstance(heads, int):
        full["num_kv_heads"] = heads
    if "ffn_size" not in full and isinstance(hidden, int):
        activation = full.get("activation")
        card = ACTIVATIONS.cards.get(activation) if isinstance(activation, str) else None
        full["ffn_size"] = -(-hidden // 24) * 64 if card and card.facts["gated"] else 4 * hidden
    return full
