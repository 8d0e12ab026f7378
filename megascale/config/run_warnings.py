"""Warnings about a run that is valid and hardly meant: nothing saved, very many epochs, keys that wait for a switch."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.config.backends import Fp8Config
from megascale.config.data import DataConfig
from megascale.config.dataset_files import count_tokens
from megascale.config.exclusions import ONE_EXPERT, REMOVE, SWITCHED_OFF
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.model_rules import unbalanced_experts
from megascale.config.parallel import OverlapConfig, ParallelConfig
from megascale.config.rules import run_rules
from megascale.config.run import RunConfig
from megascale.config.site_rules import ONE_SITE, late_outer_step
from megascale.config.train import TrainConfig

LONG_STEPS = 1000  # steps after which a run with default settings has a checkpoint
LARGE_WORLD = 8  # processes of one host: a job of several is more likely to lose one
MANY_EPOCHS = 100.0


def run_warnings(config: RunConfig, *, restarts: bool = False) -> Iterator[str]:
    """Yield what the user of a resolved configuration should know before the run starts, a line each. `restarts`: a
    driver restarts the run after a fault.
    """
    rules = (
        *SWITCHED_OFF, ONE_SITE, ONE_EXPERT, late_outer_step, waiting_keys, unbalanced_experts, static_scales,
    )  # fmt: skip
    found = run_rules(rules, dict(config))
    for finding in (*_nothing_saved(config, restarts), *_many_epochs(config), *_unreached_recipes(config), *found):
        yield str(finding)


def waiting_keys(
    model: ModelConfig, parallel: ParallelConfig, overlap: OverlapConfig, data: DataConfig
) -> Iterator[Finding]:
    """Warn of keys without effect for which any of several others would have one."""
    if parallel.replicas * parallel.cp == 1 and not (model.experts and parallel.tp > parallel.ep):
        hint = f"more ranks (`check --gpus N`), or {REMOVE}"
        if parallel.zero > 1:
            yield Finding("parallel.zero", "shards nothing with dp x cp = 1", hint)
        if parallel.grad_reduce == "fp8":
            yield Finding("parallel.grad_reduce", "reduces nothing with dp x cp = 1", hint)
    ring = parallel.hybrid_dp or (parallel.cp_keys > 1 and parallel.cp_mode != "allgather")
    if not overlap.cp and not ring:
        message = f"has no effect without a ring (cp = {parallel.cp}, cp_mode = {parallel.cp_mode})"
        yield Finding("overlap.cp", message, REMOVE)
    if data.reader != "host" and not data.blend_policy and data.prefetch != DataConfig.model_fields["prefetch"].default:
        yield Finding("data.prefetch", f"has no effect with reader = {data.reader}", f"data.reader = host, or {REMOVE}")


def static_scales(model: ModelConfig, train: TrainConfig, fp8: Fp8Config) -> Iterator[Finding]:
    """Warn of static scales of tensors whose variance nothing keeps."""
    if train.quantizes and fp8.facts["scaling"] == "static" and not model.unit_scaling:
        message = f"= {fp8.recipe}: scales stay those of the first step, and only unit scaling keeps tensors near them"
        yield Finding("fp8.recipe", message, "model.unit_scaling = true, or another fp8.recipe")


def _unreached_recipes(config: RunConfig) -> Iterator[Finding]:
    """Warn of recipes whose share of the run follows the beginning of its last step."""
    begun = config.step_samples.before_step(config.train.steps) / config.samples
    for start, change in config.fp8.schedule if config.train.quantizes else ():
        if start > begun:
            message = f"{change} at {start} has no effect: the last of {config.train.steps} steps begins at {begun:.4g}"
            yield Finding("fp8.schedule", message, "a smaller share, or more steps")


def _nothing_saved(config: RunConfig, restarts: bool) -> Iterator[Finding]:
    """Warn of a long or large run without checkpoints, or one that restarts. Mock data train nothing worth a save."""
    steps, world = config.train.steps, config.world_size
    short = steps < LONG_STEPS and world <= LARGE_WORLD
    if config.checkpoint.every or (not restarts and (config.data.mock or short)):
        return
    message = f"= 0: {steps} steps of {world} processes save nothing, and every restart begins at step 0"
    yield Finding("checkpoint.every", message, f"checkpoint.every = {min(LONG_STEPS, max(1, steps // 10))}")


def _many_epochs(config: RunConfig) -> Iterator[Finding]:
    """Warn of a dataset that is read more than MANY_EPOCHS times."""
    for share, prefix, tokens in count_tokens(config.data, "train"):
        if not isinstance(tokens, int):
            return  # the rules report it
        epochs = config.samples * share * config.model.seq_length / max(tokens, 1)
        if epochs > MANY_EPOCHS:
            fewer = max(1, int(config.train.steps / epochs))
            message = f"= {config.train.steps} reads {prefix} {epochs:.0f} times"
            yield Finding("train.steps", message, f"more data, or fewer steps; an epoch has {fewer}")
