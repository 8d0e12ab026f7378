"""The hint about operations slowed by a missing library or compiler on a GPU."""

from __future__ import annotations

from megascale.catalog.backends import AUTO, BACKENDS, is_multi_pass, unmet_requirement
from megascale.ops.core_attention import torch_attention_outdated
from megascale.ops.library import FLASH3, FLASH4
from megascale.ops.select import BackendChoice, NotByDefault, OpContext, select_backend


def slow_backend_hint(context: OpContext) -> str | None:
    """Name the operations with a multi-pass backend, or an older attention kernel, and the installations to fix them.

    None on a CPU, and if no installation would help. Raises: BackendError if a requested backend is unsupported
    """
    if context.device.is_cpu:
        return None
    auto_ops = (op for op in BACKENDS if context.uses(op) and context.requested_backend(op) == AUTO)
    missing = {op: _faster_backends(select_backend(op, context), context) for op in auto_ops}
    slow = [op for op, reasons in missing.items() if reasons]
    if not slow:
        return None
    reasons = dict.fromkeys(reason for op in slow for reason in missing[op])
    return f"{', '.join(slow)}: slower than possible on this GPU; missing, any of: {'; '.join(reasons)}"


def _faster_backends(choice: BackendChoice, context: OpContext) -> list[str]:
    """List faster backends and why they are unavailable, if an installation would help; [] if the choice is fast."""
    operation = choice.operation
    need, cards = context.requirement(operation), BACKENDS[operation]
    candidates = {
        name: reason for name, reason in choice.rejected.items() if unmet_requirement(cards[name], need) is None
    }
    if not candidates:
        return []
    attention = operation == "attention"
    slow = is_multi_pass(cards[choice.backend], need)
    if attention:  # newer kernels are faster than torch's with windows or documents, or where its kernel is outdated
        masked = any(context.model.windows) or context.document_mask
        slow = choice.backend == "torch" and (masked or torch_attention_outdated(context))
    if not slow:
        return []
    if attention and "flash" in candidates and not need.has_window:
        newer = FLASH3 if context.device.capability[0] == 9 else FLASH4  # torch includes version 2
        candidates["flash"] = newer.missing_reason() or candidates["flash"]
    return [f"{name}: {reason}" for name, reason in candidates.items() if not isinstance(reason, NotByDefault)]
