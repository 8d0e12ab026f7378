"""Layers of multi-token prediction in files: they follow the others, and have copies of the embedding and the head."""

from __future__ import annotations

from megascale.convert.families.family import Key
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING

KEYS = {"mtp_layers": Key("num_nextn_predict_layers", 0)}

LAYER = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "merge", "shared_head.norm": "final_norm"}
"""Modules beside those of a block, as in `Family.layer`; `eh_proj` is of [embedding, hidden state]."""

COPIES = {"embed_tokens.weight": TOKEN_EMBEDDING, "shared_head.head.weight": HEAD}
"""Tensors of a layer that are equal to a tensor of the model."""
