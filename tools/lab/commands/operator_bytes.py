"""Launches of one layer of a model, forward and backward of a micro-batch, and the bytes that they read and write, in
bf16 and in every FP8 recipe, counted without a GPU on tensors without data. Triton must be installed, for the arguments
of its kernels.

A step's second micro-batch is counted: it adds to the gradients of weights, which have been cast. Compiled functions
and attention are a kernel each way; their statistics of rows are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn

from lab.launches import Fused, Launch, LaunchCounter, TritonKernel, noted_kernels
from megascale.catalog.layers import ACTIVATIONS, BLOCKS, NORMS
from megascale.catalog.recipes import RECIPES
from megascale.config.loading import load_config
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.device import detect_device
from megascale.layout.chunks import fp8_layers
from megascale.layout.parameters import layer_params
from megascale.layout.topology import topology_of
from megascale.model import attention
from megascale.model.layer_ops import LayerOps
from megascale.model.modules import LayerContext, Linear
from megascale.ops.activation import Activate
from megascale.ops.core_attention import AttentionMask
from megascale.ops.fp8 import Fp8Kernels
from megascale.ops.norm import compose_add_norm
from megascale.ops.rope import Rope, rotate_by, rotation
from megascale.parallel.fp8_linear import Fp8Gemms, build_linear_gemms
from megascale.parallel.fp8_state import Fp8State
from megascale.parallel.grad_accumulation import Accumulation
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.rng import Dropout
from megascale.parallel.tp_overlap import TensorParallel
from megascale.plan.dryrun.fake_mesh import fake_mesh
from megascale.record.recorder import Recorder
from megascale.train.op_context import op_context
from results import pipes

META = torch.device("meta")

CASTS = (
    TritonKernel("_fp8_amax", ("x",), ("amax",)),
    TritonKernel("_fp8_cast", ("x", "amax"), ("scale", "data", "transposed", "by_column")),
    TritonKernel("_fp8_cast_rows", ("x",), ("scale", "data", "by_column")),  # the second read of a row is from cache
)
SWIGLU = (TritonKernel("_swiglu", ("gate_up", "grad", "amax"), ("out", "scale", "data", "transposed")),)
WGRADS = (TritonKernel("_fp8_gemm", ("a", "b", "scale_a", "scale_b", "total"), ("total",)),)

CONFIG = "configs/bench/llama3-8b-slice.toml"
BF16, WEIGHTS = "bf16", "casts of weights, once a step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--config", default=CONFIG, metavar="FILE", help="of the model; default %(default)s")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    counts = {name: count(recipe_config(options.config, name)) for name in (BF16, *RECIPES.names())}
    print("Launches: MB read + MB written.\n")
    print("\n".join(pipes(*table(counts))))
    return 0


def table(counts: Mapping[str, Sequence[Launch]]) -> list[list[str]]:
    """Return the rows of the table: an operator each, and the sum of all but the casts of weights."""
    names = dict.fromkeys(launch.name for launches in counts.values() for launch in launches)
    names.pop(WEIGHTS, None)
    rows = {name: [[one for one in each if one.name == name] for each in counts.values()] for name in (*names, WEIGHTS)}
    rows["sum of a micro-batch"] = [[one for one in each if one.name != WEIGHTS] for each in counts.values()]
    return [["operator", *counts], *([name, *map(cell, row)] for name, row in rows.items())]


def cell(launches: Sequence[Launch]) -> str:
    """Format the number of launches and their bytes."""
    read, written = sum(launch.read for launch in launches) / 1e6, sum(launch.written for launch in launches) / 1e6
    return f"{len(launches)}: {read:,.0f} + {written:,.0f}" if launches else ""


def recipe_config(path: str, recipe: str) -> RunConfig:
    """Return a configuration in a recipe, or in bf16."""
    words = [] if recipe == BF16 else ["train.precision=fp8", f"fp8.recipe={recipe}"]
    return load_config(path, words, 1, skip_sections=["data"])


def count(config: RunConfig) -> list[Launch]:
    """Return the launches of the first layer."""
    counter, shape = LaunchCounter(), (config.model.seq_length, config.batch.micro, config.model.hidden_size)
    x, grad = (torch.empty(shape, dtype=torch.bfloat16, device=META, requires_grad=needed) for needed in (True, False))
    batch = MicroBatch(None, None, None, Dropout(0.0, 0, (), torch.device("cpu")))
    with ExitStack() as stack:
        block = build_block(config, counter, stack)
        stack.enter_context(counter)
        torch.autograd.grad(block(x, batch), x, grad)  # casts weights, and begins gradients
        counter.take()
        torch.autograd.grad(block(x, batch), x, grad)
        found = counter.take()
        cast_weights(block)
    return [*found, *(launch._replace(name=WEIGHTS) for launch in counter.take())]


def cast_weights(block: nn.Module) -> None:
    """Cast the weights, as a step does once."""
    for layer in block.modules():
        if isinstance(layer, Linear) and isinstance(gemms := layer.params.gemms, Fp8Gemms):
            gemms.state.invalidate_weights()
            gemms.weight_for_forward(layer.weight)


def build_block(config: RunConfig, counter: LaunchCounter, stack: ExitStack) -> nn.Module:
    """Build a layer on tensors without data, with the backends of a GPU with Triton. `stack` takes what notes its
    kernels.
    """
    model, topology = config.model, topology_of(config.parallel)
    stack.enter_context(mock.patch(f"{attention.__name__}.rope_table", angles))
    mesh = fake_mesh(topology, 0, Recorder(), tied=model.tie_embeddings, collectives_in_pieces=True)
    tp = TensorParallel(mesh.tp, config.parallel.sp, config.overlap.tp is True)
    context = LayerContext(model, {}, tp, operators(config, counter, stack))
    if config.train.quantizes:
        state = Fp8State(
            model, config.fp8, fp8_layers(model, config.train, config.fp8), mesh, META, noted_triton(counter, stack)
        )
        state.end_restore()  # a step later than the first: delayed scaling has a history
        state.begin_step(collect_stats=False)
        context = replace(context, linear_gemms=partial(build_linear_gemms, state=state, tp=tp))
    parameters = {}
    for spec in layer_params(model, 0):
        weight = nn.Parameter(torch.empty(spec.local_shape(topology), dtype=torch.bfloat16, device=META))
        weight.main_grad = torch.empty_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        weight.accumulation = Accumulation(partial(wgrad, counter))  # type: ignore[attr-defined]
        parameters[spec.name] = weight
    block: nn.Module = BLOCKS[model.block].load()(replace(context, parameters=parameters), 0)
    return block


def noted_triton(counter: LaunchCounter, stack: ExitStack) -> Fp8Kernels:
    """Return the kernels of Triton, noted while `stack` is open."""
    from megascale.ops import cast_transpose, scaled_wgrad

    stack.enter_context(noted_kernels(counter, cast_transpose, CASTS))
    stack.enter_context(noted_kernels(counter, scaled_wgrad, WGRADS))
    return Fp8Kernels(cast_transpose.amax, cast_transpose.cast, scaled_wgrad=scaled_wgrad.scaled_wgrad, strided=True)


def wgrad(counter: LaunchCounter, total: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
    """Note a GEMM that accumulates (`ops.wgrad.Wgrad`)."""
    counter.note("addmm", [grad, x, *([total] if add else [])], total)


def operators(config: RunConfig, counter: LaunchCounter, stack: ExitStack) -> LayerOps:
    """Return a layer's operators: each a launch forward, and one backward."""
    model: ModelConfig = config.model
    norm, setting = NORMS[model.norm].load(), op_context(config, detect_device(allow_gpu=False))
    keeps = setting.takes_amax
    activation = ACTIVATIONS[model.activation].load()
    activate: Activate = Fused(counter, model.activation, activation, lambda given, out: given, keeps=keeps)
    if setting.casts_by_tensor and model.activation == "swiglu":
        from megascale.ops import triton_swiglu

        stack.enter_context(noted_kernels(counter, triton_swiglu, SWIGLU))
        activate = triton_swiglu.swiglu
    return replace(
        LayerOps.from_context(setting),
        attend=Fused(counter, "dot_product_attention", attend, lambda given, out: (*given[:3], *out)),
        rotate=partial(rotate_by, counter.noted("rope", rotation)),
        normalize=Fused(counter, model.norm, norm, lambda given, out: given[:2], keeps=keeps),
        add_normalize=Fused(
            counter, f"add, {model.norm}", compose_add_norm(norm), lambda given, out: (out[0], given[2]), 2, keeps
        ),
        activate=activate,
    )


def angles(s: int, rope: Rope, dtype: torch.dtype, device: torch.device, spans: object) -> tuple[Tensor, Tensor]:
    """Stand in for `rope_table`, which copies from the host."""
    cos, sin = torch.empty(2, s, 1, 1, rope.d // 2, dtype=dtype, device=device)
    return cos, sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Return a result of the layout that flash kernels write."""
    b, heads, s, d = q.shape
    return q.new_empty(b, s, heads, d).transpose(1, 2)
