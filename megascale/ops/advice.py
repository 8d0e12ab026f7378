"""What runs slower than it could on this GPU for want of a library or a compiler, in a line for people."""

from __future__ import annotations

from megascale.catalog.backends import AUTO, BACKENDS, lacks, passes
from megascale.ops.attention import outdated
from megascale.ops.library import FLASH3
from megascale.ops.select import Choice, Reluctance, Setting, select


def advice(setting: Setting) -> str | None:
    """Which operations are left to a backend that makes several passes over memory, or to an older kernel of attention,
    and what would mend it. None on a CPU, and where nothing that can be installed would.

    Raises: BackendError if a backend that is asked for cannot serve
    """
    if setting.device.is_cpu:
        return None
    open_ones = (op for op in BACKENDS if setting.uses(op) and setting.asked(op) == AUTO)
    missing = {op: _missing(select(op, setting), setting) for op in open_ones}
    slow = [op for op, reasons in missing.items() if reasons]
    if not slow:
        return None
    reasons = dict.fromkeys(reason for op in slow for reason in missing[op])
    return f"{', '.join(slow)}: slower than they need be on this GPU, for want of one of: {'; '.join(reasons)}"


def _missing(choice: Choice, setting: Setting) -> list[str]:
    """Why no faster backend of an operation serves, as far as an installation would mend it; [] if a fast one does."""
    operation = choice.operation
    need, cards = setting.need(operation), BACKENDS[operation]
    could = {name: reason for name, reason in choice.refusals.items() if lacks(cards[name], need) is None}
    attention = operation == "attention"
    if not could or not (_older(choice, setting) if attention else passes(cards[choice.backend], need)):
        return []
    if attention and "flash" in could and not need.windows:
        could["flash"] = FLASH3.absence() or could["flash"]  # the second version is what torch has
    return [f"{name}: {reason}" for name, reason in could.items() if not isinstance(reason, Reluctance)]


def _older(choice: Choice, setting: Setting) -> bool:
    """Whether attention is torch's and newer kernels are faster on this GPU. Windows torch computes in blocks."""
    return choice.backend == "torch" and (any(setting.model.windows) or outdated(setting))
