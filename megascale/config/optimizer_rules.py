"""Rules of what a rule of `[optimizer]` changes beside the update: where its state is, and what layers save."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.catalog.optimizers import OPTIMIZERS, with_defaults
from megascale.config.exclusions import is_full_precision, only, unless, unsupported
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.train import OptimizerConfig

OFFLOAD = unsupported(
    "optimizer.offload",
    ("optimizer.master_weights", only("full"), "compensated weights are the device's weights", "full"),
    ("train.weight_average", only("none"), "averages are of master weights on the device", "none"),
    ("sites.count", only(1), "outer steps are of master weights on the device", "1"),
    ("fault.rebuild_stage", only(0), "stages are rebuilt from state on the device", "0"),
    when=unless("none"), off="optimizer.offload = none",
)  # fmt: skip

PROJECTED_INPUTS = unsupported(
    "optimizer.name",
    ("optimizer.groups", only([]), "layers save what one rule needs", "no groups"),
    ("train.precision", is_full_precision, "wgrad is of projected inputs", "bf16"),
    ("train.recompute", unless("full"), "blocks save their own inputs, not those of layers", "none"),
    ("train.memory", lambda memory: not isinstance(memory, list) or not {"full", "full_host"} & {*map(str, memory)},
     "blocks save their own inputs, not those of layers", "keep, selective, host or nvme"),
    ("train.recompute_ops", only(None, ["attention"]), "recomputed inputs are not saved", '["attention"]'),
    ("train.mlp_tiles", only(1), "tiles save no inputs of layers", "1"),
    ("train.noise_scale_every", only(0), "gradients have the noise of the projection", "0"),
    ("model.experts", only(0), "experts keep whole inputs", "0"),
    ("model.kv_lora_rank", only(0), "latent projections keep whole inputs", "0"),
    ("model.mtp_layers", only(0), "MTP layers keep whole inputs", "0"),
    ("overlap.tp", unless("domino"), "halves of a micro-batch share no projection", "true"),
    when=lambda name: bool(OPTIMIZERS[str(name)].facts.get("input_projection")), off="another rule",
)  # fmt: skip


def offloaded_state(optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Check that state in host memory is of rules of elements, any run of which can be updated alone."""
    fit = [name for name in OPTIMIZERS.names() if OPTIMIZERS[name].facts["unit_of_work"] == "elements"]
    for rule in dict.fromkeys((optimizer.name, *(group.get("name", optimizer.name) for group in optimizer.groups))):
        if optimizer.offload != "none" and rule not in fit:
            message = f"{rule} sees whole matrices or parameters, and a sub-group in host memory is any run of elements"
            yield Finding("optimizer.offload", message, f"none, or the rule {' or '.join(fit)}")


def projected_inputs(model: ModelConfig, optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Check that projections of inputs have fewer elements than the inputs of any layer."""
    facts = with_defaults(OPTIMIZERS[optimizer.name].facts)
    rank = optimizer.options.get("rank", facts["options"].get("rank"))
    width = min(model.hidden_size, model.ffn_size, model.num_heads * model.head_dim)
    if facts["input_projection"] and isinstance(rank, int) and rank >= width:
        message = f"{optimizer.name}: rank is {rank}, and a layer has {width} inputs: it would save no fewer elements"
        yield Finding("optimizer.options", message, f"a rank below {width}")
