"""Rules of an MLP in tiles (`train.mlp_tiles`): its tokens, FP8 scales, and keys without an effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megascale.catalog.layers import BLOCKS
from megascale.catalog.recipes import RECIPES
from megascale.config.finding import Finding, Rule


def tile_tokens(c: Any) -> Iterator[Finding]:
    """Check that a rank's sequences have tokens for every tile, and with FP8 whole blocks of tokens."""
    p, t = c.parallel, c.train
    rows = (c.data.chunk_tokens or c.model.seq_length // p.cp) // (p.tp if p.sp else 1)
    if t.mlp_tiles == 1:
        return
    if t.mlp_tiles > rows:
        message = f"a rank has {rows} tokens of a sequence for {t.mlp_tiles} tiles"
        yield Finding("train.mlp_tiles", message, f"at most {rows}")
    elif t.quantizes:
        alignment, tokens = RECIPES[c.fp8.recipe].facts["alignment"], rows * c.batch.micro
        if rows % t.mlp_tiles or tokens // t.mlp_tiles % alignment:
            message = f"{tokens} tokens on a rank in {t.mlp_tiles} tiles: the fp8 recipe {c.fp8.recipe} needs multiples"
            yield Finding("train.mlp_tiles", f"{message} of {alignment} in a tile", "fewer tiles")


def tile_scales(c: Any) -> Iterator[Finding]:
    """Check that FP8 scales of a tile are those of all tokens."""
    t, facts = c.train, RECIPES[c.fp8.recipe].facts
    if t.mlp_tiles == 1 or not t.quantizes:
        return
    if facts["scaling"] != "static" and facts["granularity"] != "block":
        message = f"with the fp8 recipe {c.fp8.recipe} a scale covers all tokens, and a tile would have its own"
        yield Finding("train.mlp_tiles", message, "1, or fp8.recipe = blockwise or mu_unit")
    elif BLOCKS[c.model.block].facts.get("shares_casts"):
        message = f"attention and MLP of a {c.model.block} block share an fp8 operand, and tiles have their own"
        yield Finding("train.mlp_tiles", message, "1, or train.precision = bf16")


def tile_recomputation(c: Any) -> Iterator[Finding]:
    """Check that the activation function is not recomputed apart from its tile."""
    if c.train.mlp_tiles > 1 and "activation" in (c.train.recompute_ops or ()):
        message = f"activation has no effect with mlp_tiles = {c.train.mlp_tiles}: a tile is recomputed as a whole"
        yield Finding("train.recompute_ops", message, "without activation")


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("model", "parallel", "batch", "train", "data", "fp8"), tile_tokens),
    (("model", "train", "fp8"), tile_scales),
    (("train",), tile_recomputation),
)
