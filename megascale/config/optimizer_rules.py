"""Rules of what a rule of `[optimizer]` changes beside the update: where its state is."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.config.exclusions import Exclusions, only, unless, unsupported
from megascale.config.finding import Finding
from megascale.config.train import OptimizerConfig

NO_OFFLOAD = Exclusions("optimizer.offload", only("none"), tuple(
    (f"optimizer.{name}", only(OptimizerConfig.model_fields[name].default), "has no effect with {name} = {given}",
     "optimizer.offload = host, or remove the key")
    for name in ("offload_stride", "offload_subgroup")
))  # fmt: skip

OFFLOAD = unsupported(
    "optimizer.offload",
    ("optimizer.master_weights", only("full"), "compensated weights are the device's weights", "full"),
    ("train.weight_average", only("none"), "averages are of master weights on the device", "none"),
    ("sites.count", only(1), "outer steps are of master weights on the device", "1"),
    ("fault.rebuild_stage", only(0), "stages are rebuilt from state on the device", "0"),
    when=unless("none"), off="none",
)  # fmt: skip


def offloaded_state(optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Check that state in host memory is of rules of elements, any run of which can be updated alone."""
    rules = (optimizer.name, *(group.get("name", optimizer.name) for group in optimizer.groups))
    for rule in dict.fromkeys(rules if optimizer.offload != "none" else ()):
        if OPTIMIZERS[rule].facts["unit_of_work"] != "elements":
            message = f"{rule} sees whole matrices or parameters, and a sub-group in host memory is any run of elements"
            fit = [name for name in OPTIMIZERS.names() if OPTIMIZERS[name].facts["unit_of_work"] == "elements"]
            yield Finding("optimizer.offload", message, f"none, or the rule {' or '.join(fit)}")
