"""LLM-JEPA (Huang, LeCun and Balestriero, arXiv 2509.14252): the last hidden state of a view predicts that of another.

    L = L_next token + weight x mean over pairs of d(Pred(Enc(view 1)), Enc(view 2)),    d = 1 - cosine

Enc(view) is the hidden state of its last token. The predictor is the model itself: view 1 ends in one or more [PRED]
tokens, of which the last has the id `predictor`, and its hidden state is Pred(Enc(view 1)). The views are documents of
a packed sample that follow each other; with `data.attention_mask = "document"` neither sees the other, and one forward
has both. Gradients reach both views.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from torch import Tensor
from torch.nn.functional import cosine_similarity


class Jepa:
    """The objective of a [PRED] token."""

    def __init__(self, predictor: int) -> None:
        self.predictor = predictor

    def choose(self, tokens: np.ndarray, documents: list[tuple[int, int]]) -> np.ndarray:
        """Return the last places [n, 2] of the pairs of a sample: of documents that end in the predictor, and of those
        after them, unless the sample's end cuts these.
        """
        pairs = pairwise(stop - 1 for _, stop in documents)
        found = [pair for pair in pairs if tokens[pair[0]] == self.predictor and pair[1] + 1 < len(tokens)]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def loss(self, states: Tensor) -> Tensor:
        """Return the sum of the distances of the pairs [n, 2, h]."""
        predicted, encoded = states.unbind(1)
        return (1 - cosine_similarity(predicted, encoded, dim=-1)).sum()
