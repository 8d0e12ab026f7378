"""torchtitan's trainer on CPUs: a rank of `torchrun torchtitan_on_cpu.py JSON`, in the Python that has torchtitan.

JSON has `peers`, the folder of torchtitan_cpu.py; its `arguments`; `tokens`, a file of inputs and labels [2, steps,
batch, sequence]; `kv_heads` and `fused`, of attention; `folder` of checkpoints; the steps to `load` and to `save`, or
0; and `losses`, a file that gets the loss of each step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

LR, WARMUP_STEPS = 5e-3, 20  # all steps are of the warm-up
WEIGHT_DECAY = 0.1  # not of norms


def configuration(torchtitan_cpu: Any, arguments: Any, given: dict[str, Any]) -> Any:
    """The trainer's configuration, with grouped queries, AdamW with two groups, and checkpoints."""
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.models.common import config_utils

    original, attention = config_utils.make_gqa_config, {"n_kv_heads": given["kv_heads"], "fuse_qkv": given["fused"]}
    config_utils.make_gqa_config = lambda **keys: original(**(keys | attention))
    config = torchtitan_cpu.build_config(arguments)
    decays = {r"norm": 0.0, r".*": WEIGHT_DECAY}
    kept = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8}
    config.optimizer = OptimizersContainer.Config(
        implementation="fused",
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=kept | {"weight_decay": decay})
            for pattern, decay in decays.items()
        ],
    )
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=WARMUP_STEPS, total_steps=WARMUP_STEPS)
    config.checkpoint.enable, config.checkpoint.folder, config.checkpoint.interval = True, given["folder"], 1
    config.checkpoint.last_save_model_only = False
    config.dump_folder = ""
    return config


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, given["peers"])
    sys.argv[1:] = given["arguments"]
    import torchtitan_cpu

    arguments = torchtitan_cpu.parse_args()
    torchtitan_cpu.patch()
    torch.manual_seed(arguments.seed)
    trainer = configuration(torchtitan_cpu, arguments, given).build()
    torchtitan_cpu.init_by_name(trainer.model_parts, arguments.seed)
    seen: dict[str, float] = {}
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: seen.update(loss=loss)
    if given["load"]:
        assert trainer.checkpointer.load(given["load"]) and trainer.step == given["load"]
    tokens = torch.from_numpy(np.load(given["tokens"]))
    rows = arguments.global_batch // arguments.dp
    first = rows * (dist.get_rank() // arguments.tp)
    losses = []
    for step in range(trainer.step + 1, arguments.steps + 1):
        trainer.step = step
        inputs, labels = tokens[:, step - 1, first : first + rows]
        size = arguments.micro_batch
        trainer.train_step(
            ({"input": inputs[row : row + size]}, labels[row : row + size]) for row in range(0, rows, size)
        )
        losses.append(seen["loss"])
        if step == given["save"]:
            trainer.checkpointer.save(step)
    if dist.get_rank() == 0:
        Path(given["losses"]).write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)  # gloo's tear-down would wait for exited ranks


if __name__ == "__main__":
    main()
