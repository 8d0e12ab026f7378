"""Activations saved for backward equal the block description's, measured by torch's allocator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.layout.blocks import block_spec
from megascale.layout.chunks import fp8_layers
from megascale.layout.recompute_policy import recompute_policy
from megascale.plan.account.activations import block_bytes, embedding_bytes, head_bytes
from megascale.plan.account.sizes import micro_batch_sizes
from tests.marks import only_quick_rows
from tests.memory import held_bytes
from tests.runs import FAMILIES, build_run, config_of, settings
from tests.worlds import run_world

OPERATIONS = ["attention", "norm", "activation"]
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"train__recompute": "full"},
    **{op: {"train__recompute": "selective", "train__recompute_ops": [op]} for op in OPERATIONS},
    "all operations": {"train__recompute": "selective", "train__recompute_ops": OPERATIONS},
}
VARIANTS: list[dict[str, Any]] = [
    {"train__precision": "fp32", "batch__micro": 2},
    {"train__precision": "bf16", "model__block": "parallel"},
    {"train__precision": "fp64", "model__dropout": 0.1},
    {"train__precision": "bf16", "model__window": [5, 0]},
    {"train__precision": "bf16", "model__attention_sinks": True, "model__window": [5, 0]},
    {"train__precision": "fp32", "model__attention_sinks": True, "batch__micro": 2},
    {"train__precision": "bf16", "model__sparse_attention": {"local_blocks": 2, "stride": 4, "block": 8}},
    {"train__precision": "fp32", "model__sparse_attention": {"local_blocks": 2, "stride": 2, "block": 8}},
    {"train__precision": "fp32", "model__block": "sandwich", "model__norm": "rmsnorm_1p", "model__dropout": 0.1},
    {"train__precision": "bf16", "model__block": "post_norm", "model__logit_softcap": 30.0},
    {"train__precision": "bf16", "model__block": "fog", "model__qk_norm": "fixed", "model__norm": "rmsnorm"},
    {"train__precision": "fp32", "model__block": "fog", "model__qk_norm": "tanh", "model__residual_tau": 0.25},
    {"train__precision": "bf16", "model__block": "post_norm", "model__residual_tau": 0.25, "model__dropout": 0.1},
    {"train__precision": "bf16", "model__block": "parallel_two_norms", "model__embedding_scale": 4.0},
    {"train__precision": "fp8", "fp8__recipe": "tensorwise", "fp8__last_layers_bf16": 1},
    {"train__precision": "fp8", "fp8__recipe": "tensorwise", "model__block": "post_norm"},
    {"train__precision": "fp8", "fp8__recipe": "rowwise", "model__block": "parallel_two_norms"},
    {"train__precision": "fp8", "fp8__recipe": "rowwise", "model__block": "parallel"},
    {"train__precision": "fp8", "fp8__recipe": "rowwise", "fp8__scale": "pow2"},
    {"train__precision": "fp8", "fp8__recipe": "mxfp8"},
    {"train__precision": "bf16", "model__attention_pattern": "LS", "batch__micro": 2},
]
TILED = [
    ("none", {"train__precision": "bf16"}),
    ("full", {"train__precision": "fp32", "model__dropout": 0.1}),
    ("norm", {"train__precision": "bf16", "model__dropout": 0.1}),
    ("attention", {"train__precision": "bf16", "model__block": "parallel"}),
    ("norm", {"train__precision": "fp32", "model__block": "parallel"}),
    ("none", {"train__precision": "bf16", "model__block": "parallel_two_norms"}),
    ("none", {"train__precision": "fp32", "model__block": "sandwich", "model__norm": "rmsnorm_1p"}),
    ("none", {"train__precision": "bf16", "model__block": "post_norm"}),
    ("norm", {"train__precision": "fp8", "fp8__recipe": "static", "fp8__last_layers_bf16": 1}),
]
SIZES = {"hidden_size": 128, "ffn_size": 256, "seq_length": 128, "num_layers": 3}


def saved_bytes(config: RunConfig) -> int:
    """Bytes saved for backward by a rank, per micro-batch."""
    sizes, model, fp8 = micro_batch_sizes(config), config.model, fp8_layers(config.model, config.train, config.fp8)
    blocks = (
        block_bytes(sizes, block_spec(model, n), n in fp8, recompute_policy(config.train, n)).saved
        for n in range(model.num_layers)
    )
    return sum(blocks) + embedding_bytes(sizes).saved + head_bytes(sizes).saved


def held(rank: Rank, configs: list[RunConfig]) -> list[int]:
    """Allocated bytes after the forward of a micro-batch, by run."""
    sizes = []
    for config in configs:
        run = build_run(rank, config)
        (stage,), micro_batch = run.stages, run.train_loader.batch(0).micro_batches[0]
        if run.fp8_state is not None:
            run.fp8_state.begin_step(collect_stats=False)
        stage(None, micro_batch)  # fills caches
        sizes.append(held_bytes(lambda stage=stage, micro_batch=micro_batch: stage(None, micro_batch)))
    return sizes


@pytest.mark.parametrize(
    ("family", "every"), only_quick_rows([*itertools.product(FAMILIES, [1]), ("llama", 5)], ("llama", 5))
)
def test_saved_activations_equal_the_allocators(family: str, every: int, tmp_path: Any) -> None:
    """Every fifth case has all settings and all variants, not together."""
    cases = [(name, variant) for name in SETTINGS for variant in VARIANTS]
    cases += [(name, variant | {"train__mlp_tiles": 4}) for name, variant in TILED]
    cases = cases[::every]
    trees = [settings(FAMILIES[family] | SIZES, tmp_path, **SETTINGS[name], **more) for name, more in cases]
    configs = [config_of(tree, tmp_path) for tree in trees]
    for case, config, allocated in zip(cases, configs, run_world(1, held, configs)[0], strict=True):
        assert saved_bytes(config) <= allocated <= saved_bytes(config) + 2048, case
