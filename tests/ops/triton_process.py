"""Tests of Triton kernels on a CPU, each in a process of its own: Triton's interpreter alters Triton's language for the
rest of a process, which its compiler then rejects.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

from megascale.core.rank import Rank
from tests.worlds import run_world


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Make a test run where Triton interprets its kernels."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        run_world(1, _interpret, test.__module__, f"{test.__name__}.__wrapped__", arguments)

    return run


def run_interpreted_world(world: int, function: Callable[..., Any]) -> list[Any]:
    """Run `function(rank)` on every rank of a world where Triton interprets its kernels."""
    return run_world(world, _interpret, function.__module__, function.__name__)


def _interpret(rank: Rank, module: str, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    os.environ["TRITON_INTERPRET"] = "1"  # read where triton is imported, and where a kernel is declared
    function = attrgetter(name)(import_module(module))
    return function(rank) if arguments is None else function(**arguments)


def compile_for_hopper(module: str, kernel: str, types: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    """Return the PTX of a kernel. Triton's compiler needs no GPU, and is stricter than its interpreter. `types`: of
    arguments other than fp32.
    """
    (ptx,) = run_world(1, _compile, module, kernel, types, constants)
    return str(ptx)


def _compile(rank: Rank, module: str, kernel: str, types: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(module), kernel)
    given = {**types, **dict.fromkeys(constants, "constexpr")}
    signature = {name: given.get(name, "fp32") for name in function.arg_names}
    ptx = compile(ASTSource(function, signature, dict(constants)), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return str(ptx)
