"""LLM-JEPA (Huang, LeCun and Balestriero, arXiv 2509.14252): the last hidden state of a view predicts that of another.

    L = L_next token + weight x mean over pairs of d(Pred(Enc(view 1)), Enc(view 2)),    d = 1 - cosine

Enc(view) is the hidden state of its last token. The predictor is the model itself: view 1 ends in one or more [PRED]
tokens, of which the last has the id `predictor`, and its hidden state is Pred(Enc(view 1)). The views are documents of
a packed sample that follow each other; with `data.attention_mask = "document"` neither sees the other, and one forward
has both. Gradients reach both views. Dropout leaves a sample's pairs out with this probability.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity


class Jepa:
    """The objective of a [PRED] token."""

    def __init__(self, predictor: int, dropout: float = 0.0) -> None:
        self.predictor = predictor
        self.dropout = dropout

    def choose(self, view) -> np.ndarray:  # type: ignore[no-untyped-def]
        """Return the last places [n, 2] of the pairs of a sample: of documents that end in the predictor, and of those
        after them, unless the sample's end cuts these.
        """
        ends = [stop - 1 for _, stop in view.documents]
        pairs = [
            (first, second)
            for first, second in pairwise(ends)
            if view.tokens[first] == self.predictor and second + 1 < len(view.tokens)
        ]
        return np.array([] if view.drawn < self.dropout else pairs, dtype=np.int64).reshape(-1, 2)

    def loss(self, hidden_sbh: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of the distances."""
        wide = torch.promote_types(hidden_sbh.dtype, torch.float32)
        predicted, encoded = (hidden_sbh[places, rows].to(wide) for places in chosen.unbind(1))
        return (1 - cosine_similarity(predicted, encoded, dim=-1)).sum()
