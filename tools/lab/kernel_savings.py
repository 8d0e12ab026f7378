"""Launches and bytes of a layer that kernels which are not built would save at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lab.launches import Launch
from megascale.config.run import RunConfig


class Saving(NamedTuple):
    """Launches and bytes less for a layer and micro-batch."""

    what: str
    launches: int
    nbytes: int


def savings(config: RunConfig, launches: Iterable[Launch]) -> Iterator[Saving]:
    """Yield what each kernel that is not built would save of the launches of a layer and micro-batch."""
    read, written, times = Counter[str](), Counter[str](), Counter[str]()
    for launch in launches:
        times[launch.name] += 1
        read[launch.name] += launch.read
        written[launch.name] += launch.written
    norm, activation = config.model.norm, config.model.activation
    added = f"add, {norm}"
    apart, together = (norm, "add", f"{norm} backward"), (added, f"{added} backward")
    nbytes = sum(read[name] + written[name] for name in apart) - sum(read[name] + written[name] for name in together)
    yield Saving("the block's last addition in the next norm", 2, nbytes)
    if not config.train.quantizes:
        return
    facts = config.fp8.facts
    # operands of GEMMs in 16 bits that a cast reads: results of the norms and of an activation that does not cast, and
    # the gradient of its input
    operands = written[norm] + written[added] // 2 + written[activation] + written[f"{activation} backward"]
    count = 2 + times[activation] + times[f"{activation} backward"]
    if (facts["granularity"], facts["scaling"]) != ("tensor", "current"):
        yield Saving("norms and other activations write FP8 beside 16 bits", count, operands)
    else:
        unknown = "the amax of attention's result and of gradients, in the kernels that write them"
        yield Saving(unknown, 2 * times["_fp8_amax"], read["_fp8_amax"])
    if facts["granularity"] == "tensor" and facts["scaling"] != "current":
        # of what SwiGLU writes, 16 bits are half
        yield Saving("norms and activations write FP8 without 16 bits", count, 2 * operands + written["_swiglu"] // 2)
