"""Triton's interpreter, and its compiler, on a CPU. The interpreter's own casts to FP8 truncate, and those of subnormal
numbers are wrong; here torch converts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def interpreted(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import a module of kernels for the interpreter, which rounds as a GPU does."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is declared
    for library in (tl, tl.standard):  # kernels of Triton's own, declared when triton was imported
        for function in [each for each in vars(library).values() if isinstance(each, JITFunction)]:
            monkeypatch.setattr(library, function.__name__, interpreter.InterpretedFunction(function.fn))
    monkeypatch.setattr(interpreter, "_convert_float", partial(_convert, interpreter._convert_float))
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", partial(_patch, interpreter._patch_lang_tensor))
    package, _, leaf = name.rpartition(".")
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(package, leaf, raising=False)
    yield importlib.import_module(name)
    del sys.modules[name]
    delattr(sys.modules[package], leaf)


def _convert(plain: Any, data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert elements as torch does, or as the interpreter (`plain`)."""
    formats = {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
    }
    if source.name not in formats or target.name not in formats:
        return plain(data, source, target, rounding)
    there = torch.from_numpy(np.ascontiguousarray(data)).view(formats[source.name]).to(formats[target.name])
    return there.view(getattr(torch, f"uint{8 * there.itemsize}")).numpy().reshape(data.shape)


def _patch(plain: Any, tensor: Any, *scope: Any) -> None:
    """Let an array [1] be a bound of a loop, which numpy 2.4 refuses. Later versions of Triton give a scope."""
    plain(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


@dataclass
class Launches:
    """Stands in for a kernel: notes the arguments of its launches, and computes nothing."""

    name: str
    arg_names: list[str]
    found: list[dict[str, Any]] = field(default_factory=list)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **options: self.found.append(dict(zip(self.arg_names, given, strict=True)))

    def take_keys(self) -> list[dict[str, Any]]:
        """Return what each launch compiles in: constants, in capitals, and arguments that are None."""
        keys = [
            {name: value for name, value in launch.items() if name.isupper() or value is None} for launch in self.found
        ]
        self.found.clear()
        return keys


@contextmanager
def hopper() -> Iterator[Callable[..., str]]:
    """Yield `compiled_for_hopper`, run in another process: the interpreter changes Triton for good."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield lambda *given, **options: process.submit(compiled_for_hopper, *given, **options).result()


def compiled_for_hopper(
    module: str, name: str, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int = 1
) -> str:
    """Compile a kernel for a GPU of compute capability 9.0, with aligned addresses and sides that are multiples of 16,
    and return its PTX. Arguments without a type are constants, None by default; `FP8` is the name of a type.
    """
    import triton.language as tl
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {name: constants.get(name) for name in kernel.arg_names if name not in types}
    if "FP8" in values:
        values["FP8"] = getattr(tl, {"fp8e4nv": "float8e4nv", "fp8e5": "float8e5"}[values["FP8"]])
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*") or (name in types and name in "mnk")
    }
    options = {"num_warps": warps, "num_stages": stages}
    source = ASTSource(kernel, signature, values, aligned)
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
