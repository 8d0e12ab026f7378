#!/usr/bin/env python3
"""Compare update rules with other people's implementations: 20 steps in fp32 on random gradients, of matrices of
24 x 40 and 40 x 24 (in 8 bits: 64 x 96 and 96 x 64). Print the largest difference, relative to the largest change of a
weight. The packages are no dependencies; give them a folder of their own, which a missing one leaves out of the table:

    pip install --no-deps --target runs/parity pytorch-optimizer==4.1.0 adam-mini==1.1.1 came-pytorch==0.1.3 \\
        torchao==0.18.0 zclip==1.0.0
    PYTHONPATH=runs/parity .venv/bin/python tools/experiments/optimizer_parity.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.comm.mesh import single_process_mesh
from megascale.config.train import OptimizerConfig
from megascale.layout.param_groups import ParamGroup
from megascale.ops.optimizer import UpdateInput
from megascale.optim.step_guard import StepGuard

STEPS, LR, HEAD_DIM = 20, 0.01, 8

TALL_AND_WIDE, LARGE, SQUARE = ((24, 40), (40, 24)), ((64, 96), (96, 64)), ((24, 24),)
"""Shapes; torchao quantizes state from 4096 elements on, and Adam-mini's heads are those of a square matrix."""


@dataclass(frozen=True)
class Case:
    """A rule, and an implementation: `package`, and `build`, which makes its optimizer of a module with one weight.

    `name`: the weight's. `scaled`: steps have a length of 1 before they are compared.
    """

    rule: str
    package: str
    build: Callable[[nn.Module], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, int], ...] = TALL_AND_WIDE
    name: str = "layers.0.mlp.up.weight"
    note: str = ""
    scaled: bool = False


def kozistr(name: str, **keys: Any) -> Callable[[nn.Module], Any]:
    """Return a builder of an optimizer of pytorch-optimizer."""
    return lambda module: getattr(import_module("pytorch_optimizer"), name)(
        module.parameters(), **{"lr": LR, "weight_decay": 0.0, **keys}
    )


def adam_mini(module: nn.Module) -> Any:
    """Build the authors' Adam-mini."""
    body = import_module("adam_mini").Adam_mini
    heads = {"dim": 24, "n_heads": 24 // HEAD_DIM}
    return body(module.named_parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, verbose=False, **heads)


def adamw_8bit(module: nn.Module) -> Any:
    """Build torchao's AdamW with 8-bit state."""
    body = import_module("torchao.optim").AdamW8bit
    return body(module.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


def spam_sparse(module: nn.Module) -> Any:
    """Build SPAM with the elements that this project draws."""
    keys = {"eps": 1e-8, "update_proj_gap": 10**6, "warmup_epoch": 0, "density": 0.25}
    optimizer = kozistr("SPAM", **keys)(module)
    ((name, weight),) = module.named_parameters()
    steps = walk("spam_sparse", gradients(tuple(weight.shape), 1), {"density": 0.25}, name)
    optimizer.state[weight]["mask"] = steps[0] != 0
    return optimizer


CASES = [
    Case("muon", "torch", lambda module: torch.optim.Muon(
        module.parameters(), lr=LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), {"ns_dtype": "bf16"},
        note="in bf16"),
    Case("adafactor", "torch", lambda module: torch.optim.Adafactor(
        module.parameters(), lr=LR, eps=(1e-30, 1e-3), weight_decay=0.0)),
    Case("came", "came-pytorch", lambda module: import_module("came_pytorch").CAME(
        module.parameters(), lr=LR, weight_decay=0.0, betas=(0.9, 0.999, 0.9999), eps=(1e-30, 1e-16))),
    Case("lion", "pytorch-optimizer", kozistr("Lion", betas=(0.9, 0.99))),
    Case("conda", "pytorch-optimizer", kozistr("Conda", update_proj_gap=7, scale=1.0, eps=1e-8), {"update_gap": 7}),
    Case("soap", "pytorch-optimizer", kozistr("SOAP", betas=(0.95, 0.95), eps=1e-8, precondition_frequency=7),
         {"update_gap": 7}, shapes=SQUARE, note="new bases every 7 steps"),
    Case("shampoo", "pytorch-optimizer", kozistr(
        "ScalableShampoo", betas=(0.0, 0.999), graft_type=0, matrix_eps=1e-6, use_svd=True, nesterov=False,
        preconditioning_compute_steps=1, start_preconditioning_step=1, skip_preconditioning_rank_lt=0),
        {"beta1": 0.0, "damping": 1e-6, "update_gap": 1}, note="directions, without momentum", scaled=True),
    Case("adam_mini", "adam-mini", adam_mini, note="rows"),
    Case("adam_mini", "adam-mini", adam_mini, shapes=SQUARE, name="layers.0.wq.weight", note="heads of q"),
    Case("adam_mini", "pytorch-optimizer", lambda module: import_module("pytorch_optimizer").AdamMini(
        module, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, num_embeds=24, num_heads=24 // HEAD_DIM),
        shapes=SQUARE, name="layers.0.wq.weight", note="heads of q"),
    Case("spam", "pytorch-optimizer", kozistr("SPAM", eps=1e-8, update_proj_gap=10**6, warmup_epoch=0),
         note="without reset"),
    Case("spam_sparse", "pytorch-optimizer", spam_sparse, note="the same elements, without reset"),
    Case("adamw_8bit", "torchao", adamw_8bit, shapes=LARGE),
]  # fmt: skip


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| rule | compared with | difference |\n|---|---|---|")
    for case in CASES:
        try:
            worst = max(difference(case, shape) for shape in case.shapes)
        except ImportError as error:
            print(f"| `{case.rule}` | {case.package} | not installed: {error} |")
            continue
        peer = ", ".join(filter(None, (f"{case.package} {version(case.package)}", case.note)))
        print(f"| `{case.rule}` | {peer} | {worst:.0e} |")
    print(f"| `zclip` | {zclip()} |")


def difference(case: Case, shape: tuple[int, int]) -> float:
    """Return the largest difference of a weight in any step, relative to its largest change."""
    extra = 1 if case.rule == "soap" else 0
    grads = gradients(shape, STEPS + extra)
    theirs, ours = their_steps(case, grads), walk(case.rule, grads, case.options, case.name)
    if case.scaled:
        theirs, ours = (steps / steps.flatten(1).norm(dim=1).view(-1, 1, 1) for steps in (theirs, ours))
    theirs, ours = theirs.cumsum(0), ours.cumsum(0)
    return float((theirs - ours).abs().max() / ours.abs().max())


def gradients(shape: tuple[int, ...], steps: int) -> list[Tensor]:
    """Draw the gradients of all steps."""
    return [torch.randn(shape, generator=torch.Generator().manual_seed(step)) for step in range(1, steps + 1)]


def their_steps(case: Case, grads: list[Tensor]) -> Tensor:
    """Return the changes of the weight in the steps of another implementation [steps, m, n]."""
    module, found = nn.Module(), []
    *folders, leaf = case.name.split(".")
    holder = module
    for folder in folders:
        holder.add_module(folder, nn.Module())
        holder = getattr(holder, folder)
    weight = nn.Parameter(torch.zeros(grads[0].shape))
    holder.register_parameter(leaf, weight)
    optimizer = case.build(module)
    for grad in grads:
        before, weight.grad = weight.detach().clone(), grad.clone()
        optimizer.step()
        found.append(weight.detach() - before)
    return torch.stack(found)


def walk(rule: str, grads: list[Tensor], options: Mapping[str, Any], name: str) -> Tensor:
    """Return the changes of the weight in this project's steps [steps, m, n]."""
    group, body = ParamGroup(rule, 0.0, options=options), OPTIMIZERS[rule].load()
    state = {
        key: torch.zeros(size, dtype=torch.uint8 if key in group.facts["uint8"] else torch.float32)
        for key, size in group.state_shapes(tuple(grads[0].shape)).items()
    }
    weight, found = torch.zeros_like(grads[0]), []
    for step, grad in enumerate(grads, 1):
        given = UpdateInput(grad, state, step, group.all_options, weight, HEAD_DIM, name, step == 1, LR)
        direction, state = body(given)
        found.append(-LR * direction)
    return torch.stack(found)


def zclip() -> str:
    """Return the largest relative difference of the clipped norm on a trace with spikes, as cells of the table."""
    try:
        body = import_module("zclip").ZClip
    except ImportError as error:
        return f"zclip | not installed: {error}"
    noise = torch.randn(200, generator=torch.Generator().manual_seed(1)).tolist()
    trace = [1 + 0.05 * x for x in noise]
    trace[60], trace[80], trace[120] = 30.0, 3.0, 1.3
    model, theirs = nn.Linear(1, 1, bias=False), body(mode="zscore", alpha=0.97, z_thresh=2.5, max_grad_norm=None)
    guard = StepGuard(OptimizerConfig(lr=1.0, zclip=True), single_process_mesh(), torch.device("cpu"))
    finite, worst = torch.ones((), dtype=torch.bool), 0.0
    for norm in trace:
        model.weight.grad = torch.full((1, 1), norm)
        theirs.step(model)
        bound = min(norm, float(guard.bound(torch.tensor(norm, dtype=torch.float64), finite)))
        worst = max(worst, abs(float(model.weight.grad) / bound - 1))
    return f"zclip {version('zclip')}, clipped norms of 200 steps | {worst:.0e}"


if __name__ == "__main__":
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles its step
    main()
