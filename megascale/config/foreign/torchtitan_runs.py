"""Published configurations of torchtitan 0.3, which are Python functions there, as tables of its settings."""

from collections.abc import Sequence
from typing import Any


def _llama3(flavor: str, lr: float, batch: int, steps: int, recompute: str, converters: Sequence[str] = (),
            **more: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    assets = f"./assets/hf/Llama-3.1-{flavor}"
    return {
        "model": {"name": "llama3", "flavor": flavor, "hf_assets_path": assets, "converters": converters},
        "optimizer": {"lr": lr},
        "training": {"local_batch_size": batch, "seq_len": 8192, "steps": steps, "dataset": "c4"},
        "activation_checkpoint": {"mode": recompute},
        "checkpoint": {"interval": 500},
        "validation": {"freq": 500, "steps": 1200},
        "metrics": {"enable_tensorboard": True},
        "profiling": {"enable_profiling": True, "profile_freq": 100},
    } | more


RUNS = {
    "llama3_8b": _llama3("8B", 3e-4, 1, 1000, "selective"),
    "llama3_70b": _llama3("70B", 1.5e-4, 8, 1000, "full", parallelism={"tensor_parallel_degree": 8}),
    "llama3_405b": _llama3(
        "405B", 8e-5, 2, 3000, "full", ["float8"], lr_scheduler={"warmup_steps": 600},
        parallelism={"tensor_parallel_degree": 8, "enable_async_tensor_parallel": True},
        compile={"enable": True}, float8={"filter_fqns": ["lm_head"]},
    ),
}  # fmt: skip
"""By the name of the function."""
