"""Small models, by our sizes and by Megatron-LM's arguments, and what a run of ours computes from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.core.rank import Rank
from megascale.data.mix.samples import Sample, SampleSource
from tests.convert.megatron_lm.peer import BETAS, LR, WEIGHT_DECAY
from tests.runs import GPT, LLAMA, build_run, curve_of

STEPS, SAMPLES, VOCABULARY = 10, 4, 128

GPT_ARGUMENTS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "group_query_attention": False,
    "num_query_groups": 1, "ffn_hidden_size": 128, "normalization": "LayerNorm", "norm_epsilon": 1e-5,
    "swiglu": False, "bias_gelu_fusion": False, "add_bias_linear": True, "qk_layernorm": False,
    "padded_vocab_size": VOCABULARY, "max_position_embeddings": 16, "seq_length": 16,
    "untie_embeddings_and_output_weights": False, "position_embedding_type": "learned_absolute",
    "rotary_base": 10_000, "num_experts": None, "hidden_dropout": 0.0,
}  # fmt: skip
LLAMA_ARGUMENTS = GPT_ARGUMENTS | {
    "group_query_attention": True, "num_query_groups": 2, "ffn_hidden_size": 48, "normalization": "RMSNorm",
    "swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
}  # fmt: skip
MIXTURE_ARGUMENTS = LLAMA_ARGUMENTS | {
    "qk_layernorm": True, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": 40, "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
}  # fmt: skip
WINDOWS = {"window_size": (7, 0), "window_attn_skip_freq": [1, 0, 1, 1]}
ARGUMENTS = {
    "gpt": GPT_ARGUMENTS, "llama": LLAMA_ARGUMENTS, "mixture": MIXTURE_ARGUMENTS, "windows": LLAMA_ARGUMENTS | WINDOWS,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT | {"vocab_size": VOCABULARY},
    "llama": LLAMA | {"vocab_size": VOCABULARY},
    "windows": LLAMA | {"vocab_size": VOCABULARY, "window": [8, 0, 8, 8]},
    "mixture": LLAMA
    | {"vocab_size": VOCABULARY, "qk_norm": "head", "experts": 4, "expert_ffn_size": 24, "shared_ffn_size": 40},
}


def draw_tokens(vocabulary: int = VOCABULARY) -> Tensor:
    """Tokens of all steps [steps, samples, s + 1]."""
    return torch.randint(vocabulary, (STEPS, SAMPLES, 17), generator=torch.Generator().manual_seed(5))


class Tokens(SampleSource):
    """The samples of all steps, one after the other."""

    def __init__(self, tokens: Tensor) -> None:
        self._samples = tokens.flatten(0, 1).numpy()

    def __getitem__(self, index: int) -> Sample:
        return Sample(self._samples[index])


def ours(model: dict[str, Any], folder: Path, checkpoint: Path, **overrides: Any) -> dict[str, Any]:
    """Settings of a run that goes on from a checkpoint as megatron-core does."""
    from tests.runs import settings

    betas = {"optimizer__betas": list(BETAS), "optimizer__weight_decay": WEIGHT_DECAY, "optimizer__warmup_steps": 0}
    return settings(
        model, folder, batch__global=SAMPLES, train__steps=STEPS, train__precision="fp32", optimizer__lr=LR,
        optimizer__decay="constant", checkpoint__resume=str(checkpoint), **betas, **overrides,
    )  # fmt: skip


def go_on(rank: Rank, config: Any, tokens: Tensor) -> list[float]:
    """Losses of the steps from a checkpoint up to the last."""
    from megascale.train.resume import load_initial_state

    run = build_run(rank, config)
    load_initial_state(run, lambda folder: None)
    run.train_loader.samples = Tokens(tokens)
    return [loss for loss, _ in curve_of(run, STEPS - run.progress.step)]
