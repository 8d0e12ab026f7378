"""The operators of a model's layers on a device, each by its selected backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megascale.ops.activation import Activate
from megascale.ops.core_attention import CoreAttention
from megascale.ops.cross_entropy import CrossEntropy
from megascale.ops.norm import AddNormalize, Normalize
from megascale.ops.rope import Rotate
from megascale.ops.select import CompileFn, OpContext, build_op

if TYPE_CHECKING:
    from megascale.ops.partial_attention import PartialAttention


@dataclass(frozen=True)
class LayerOps:
    """The device's operators, by selected backend (`ops.select`).

    `compile_fn`: torch.compile for functions inside a block, with train.compile; the identity otherwise.
    `partial_attend`: None unless ranks exchange keys and values.
    """

    attend: CoreAttention
    rotate: Rotate
    normalize: Normalize
    add_normalize: AddNormalize
    activate: Activate
    cross_entropy: CrossEntropy
    compile_fn: CompileFn
    partial_attend: PartialAttention | None = None

    @classmethod
    def from_context(cls, setting: OpContext) -> LayerOps:
        """Select the best available backend of every operator, or the configured backend.

        Raises: BackendError if a configured backend is unsupported here, or torch.compile does not work
        """
        compile_fn: CompileFn = _uncompiled
        if setting.compiled:  # first, for its error: a backend's error would hide the cause
            from megascale.ops.compiled import block_compile_fn

            compile_fn = block_compile_fn(setting.device)
        attend, rotate, normalize = (build_op(name, setting) for name in ("attention", "rope", "norm"))
        add_normalize, activate = (build_op(name, setting) for name in ("add_norm", "activation"))
        cross_entropy = build_op("cross_entropy", setting)
        partial = build_op("partial_attention", setting) if setting.uses("partial_attention") else None
        return cls(attend, rotate, normalize, add_normalize, activate, cross_entropy, compile_fn, partial)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
