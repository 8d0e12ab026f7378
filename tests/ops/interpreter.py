"""Triton's interpreter, and its compiler, on a CPU. The interpreter's own casts to bf16 and FP8 truncate, and those of
subnormal numbers are wrong; here torch converts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from megascale.core.rank import Rank
from tests.worlds import run_world

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


@contextmanager
def interpreted(name: str) -> Iterator[ModuleType]:
    """Import a module of kernels for the interpreter, which rounds as a GPU does. Who imports it meanwhile gets it."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    importlib.import_module(name)  # to have what the end puts back
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is declared
        for library in (tl, tl.standard):  # kernels of Triton's own, declared when triton was imported
            for function in [each for each in vars(library).values() if isinstance(each, JITFunction)]:
                patch.setattr(library, function.__name__, interpreter.InterpretedFunction(function.fn))
        patch.setattr(interpreter, "_convert_float", partial(_convert, interpreter._convert_float))
        patch.setattr(interpreter, "_patch_lang_tensor", partial(_patch, interpreter._patch_lang_tensor))
        patch.delitem(sys.modules, name)
        patch.delattr(name)
        yield importlib.import_module(name)


def _convert(plain: Any, data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert elements as torch does, or as the interpreter (`plain`)."""
    if source.name not in FORMATS or target.name not in FORMATS:
        return plain(data, source, target, rounding)
    there = torch.from_numpy(np.ascontiguousarray(data)).view(FORMATS[source.name]).to(FORMATS[target.name])
    return there.view(getattr(torch, f"uint{8 * there.itemsize}")).numpy().reshape(data.shape)


def _patch(plain: Any, tensor: Any, *scope: Any) -> None:
    """Let an array [1] be a bound of a loop, which numpy 2.4 refuses. Later versions of Triton give a scope."""
    plain(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


@dataclass
class Launches:
    """Stands in for a `kernel` that was declared without the interpreter: notes what each launch is compiled for by
    Triton's own rule: constants, types, and which numbers and addresses are multiples of 16. It computes nothing.
    """

    kernel: Any
    found: list[str] = field(default_factory=list)

    def __getitem__(self, grid: Any) -> Any:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(GPUTarget("cuda", 90, 32))
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        return lambda *given, **options: self.found.append(str(bind(*given, **options, debug=False)[1:]))


def compile_for_hopper(
    module: str, name: str, types: dict[str, str], constants: dict[str, Any], warps: int = 4, stages: int = 1
) -> str:
    """Compile a kernel for a GPU of compute capability 9.0, with aligned addresses and sides that are multiples of 16,
    and return its PTX. Arguments without a type are constants, None by default; `FP8` is the name of a type. Triton's
    compiler needs no GPU, and is stricter than its interpreter, which changes Triton for the rest of a process.
    """
    (ptx,) = run_world(1, _compile, module, name, types, constants, {"num_warps": warps, "num_stages": stages})
    return str(ptx)


def _compile(
    rank: Rank, module: str, name: str, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> str:
    import triton.language as tl
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {name: constants.get(name) for name in kernel.arg_names if name not in types}
    if values.get("FP8"):
        values["FP8"] = getattr(tl, {"fp8e4nv": "float8e4nv", "fp8e5": "float8e5"}[values["FP8"]])
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*") or (name in types and name in "mnkf")
    }
    source = ASTSource(kernel, signature, values, aligned)
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
