"""Checkpoints of torchtitan's Llama 3 and dense Qwen 3, read and written: weights, AdamW's moments and the step.

Versions 0.2 and 0.3 are read, and 0.3 is written, which has the moments of q, k and v of a layer in one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import Progress
from megascale.config.batch_rampup import batch_sizes
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.config.train import BatchConfig, OptimizerConfig
from megascale.convert import tensor_map as maps
from megascale.convert.dcp import DcpFolder, write_dcp
from megascale.convert.families.config_json import family_of_model
from megascale.convert.families.family import Family, Fused
from megascale.convert.saved_weights import open_weights, planned_steps
from megascale.core.errors import CheckpointError
from megascale.core.files import atomic_folder
from megascale.core.storage import Location
from megascale.layout.tensors import HEAD as OUR_HEAD
from megascale.layout.tensors import TOKEN_EMBEDDING
from megascale.optim.lr import learning_rate
from megascale.parallel.stateful import WEIGHTS

EMBEDDING, HEAD, OLDER_HEAD = "tok_embeddings.weight", "lm_head.weight", "output.weight"
OLDER_QUERY = "layers.0.attention.wq.weight"  # a tensor of 0.2 alone
LAYER = {
    "attention_norm": "attention_norm", "attention.q_norm": "attention.q_norm", "attention.k_norm": "attention.k_norm",
    "attention.wo": "attention.out", "ffn_norm": "mlp_norm", "feed_forward.w1": "mlp.gate",
    "feed_forward.w3": "mlp.up", "feed_forward.w2": "mlp.down",
}  # fmt: skip
QKV = {"wq": "attention.q", "wk": "attention.k", "wv": "attention.v"}
"""Module of a layer -> module of the model's."""

STATE, GROUPS = "optimizer.state.", "optimizer.param_groups."
MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = {"initial_lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
"""Key of torch's parameter groups -> key of `[optimizer]`."""

STEP, LAST_EPOCH, TOKENS = "train_state.step", "lr_scheduler.last_epoch", "train_state.ntokens_seen"


def states_of(
    model: ModelConfig, *, moments: bool, fused: bool = True, older: bool = False
) -> dict[str, dict[str, maps.Places]]:
    """Return the places of weights (`weights.`), and of `moments` (`exp_avg.`), of which those of q, k and v are
    `fused`. `older`: as in 0.2.

    Raises: CheckpointError for a model that Llama 3 and Qwen 3 do not compute
    """
    states = {WEIGHTS: _places(model, older=older)}
    for kind in MOMENTS if moments else ():
        places = _places(model, fused=True) if fused else states[WEIGHTS]
        states[f"{kind}."] = {
            ours: tuple(replace(place, name=f"{STATE}{place.name}.{kind}") for place in found)
            for ours, found in places.items()
        }
    return states


def _places(model: ModelConfig, *, fused: bool = False, older: bool = False) -> dict[str, maps.Places]:
    family = family_of_model(model).name
    rotated = ("attention.q", "attention.k") if family == "llama" else ()
    qkv = {name: Fused((part,), paired=rotated) for name, part in QKV.items()}
    if fused:
        qkv = {"wqkv": Fused(tuple(QKV.values()), per_head=True, paired=rotated)}
    within = "attention." if older else "attention.qkv_linear."
    layer = LAYER | {within + name: content for name, content in qkv.items()}
    outer = {TOKEN_EMBEDDING: EMBEDDING, "final_norm.weight": "norm.weight", OUR_HEAD: OLDER_HEAD if older else HEAD}
    places = maps.tensor_map(Family("torchtitan", "", {}, {}, outer, "layers", layer), model)
    for tensor in maps.model_tensors(model):
        if family not in ("llama", "qwen3") or tensor.name not in places or not tensor.name.endswith(".weight"):
            what = f"torchtitan's Llama 3 and Qwen 3 do not compute the model: {family}, with {tensor.name}"
            raise CheckpointError(what, hint="go through Hugging Face weights: megascale ckpt convert RUN FOLDER")
    return places


def import_checkpoint(source: Path, output: Path, config: RunConfig | None) -> list[str]:
    """Make a checkpoint of a folder of torchtitan. Without an optimizer's state it is one of weights, at step 0.

    Raises: CheckpointError if the folder is unreadable, or of another model; OSError if `output` cannot be written
    """
    if config is None:
        what = f"torchtitan:{source} does not tell heads, rope and norms of its model"
        raise CheckpointError(what, hint="give --config RUN.toml, of the run that goes on with it")
    found, model = DcpFolder(source), config.model
    moments = any(name.startswith(STATE) for name in found.tensors)
    fused, older = any(".wqkv." in name for name in found.tensors), OLDER_QUERY in found.tensors
    states = states_of(model, moments=moments, fused=fused, older=older)
    _check_tensors(found, model, states, OLDER_HEAD if older else HEAD)
    facts = config.model_dump(mode="json", by_alias=True, include={"model", "batch", "train", "optimizer"})
    progress, remarks = Progress(), list[str]()
    if moments:
        settings, remarks = _settings(found)
        facts["optimizer"] |= {"name": "adamw", "options": {}, "groups": []} | settings
        step = _step(found)
        samples = batch_sizes(config.batch).before_step(step + 1)
        progress = Progress(step, samples, samples * model.seq_length)

    tensors = (
        (kind + name, tensor)
        for kind, places in states.items()
        for name, tensor in maps.read_tensors(maps.model_tensors(model), places, found.read)
    )
    with atomic_folder(output) as folder:
        offline.write_state(folder, tensors, facts, progress=progress)
    if any(name.startswith("dataloader.") for name in found.objects):
        remarks.append("the place in torchtitan's data is left out: the run goes on after step x batch.global samples")
    return remarks


def _check_tensors(
    found: DcpFolder, model: ModelConfig, states: Mapping[str, Mapping[str, maps.Places]], head: str
) -> None:
    """Check that the tensors of a folder are all those of the model. Raises: CheckpointError"""
    shapes = dict(one for places in states.values() for one in maps.stored_shapes(model, places).items())
    for name, expected in shapes.items():
        shape = found.tensors[name].shape if name in found.tensors else None
        if shape != expected:
            has = f"has no tensor {name}" if shape is None else f"{name} has shape {list(shape)}"
            what = f"{found.folder}: {has}, {list(expected)} by the configuration"
            raise CheckpointError(what, hint="the [model] of the run that wrote the checkpoint")
    unknown = {name for name in found.tensors.keys() - shapes if not name.startswith(STATE) or name[-5:] != ".step"}
    if model.tie_embeddings and head in unknown and found.read(head).equal(found.read(EMBEDDING)):
        unknown.remove(head)
    if unknown:
        listed = ", ".join(sorted(unknown)[:3])
        what = f"{found.folder} has {len(unknown)} tensors that are not of the configuration's model: {listed}"
        raise CheckpointError(what, hint="the [model] of the run that wrote the checkpoint")


def _settings(found: DcpFolder) -> tuple[dict[str, Any], list[str]]:
    """The keys of `[optimizer]` of AdamW's settings, by those of the first parameter, and what they do not tell."""
    groups: dict[str, dict[str, Any]] = {}
    for name in found.objects:
        parameter, _, key = name.removeprefix(GROUPS).rpartition(".")
        if name.startswith(GROUPS) and key in SETTINGS:
            value = found.read_value(name)
            groups.setdefault(parameter, {})[SETTINGS[key]] = list(value) if key == "betas" else value
    first = groups.get(EMBEDDING, {})
    if lacking := SETTINGS.values() - first.keys():
        what = f"{found.folder} lacks {', '.join(sorted(lacking))} of the parameter group of {EMBEDDING}"
        raise CheckpointError(what, hint="a checkpoint with AdamW, or of weights alone")
    remarks, vectors = list[str](), first | {"weight_decay": 0.0}
    if other := [name for name, group in groups.items() if group != (vectors if "norm" in name else first)]:
        what = f"{len(other)} parameters, such as {other[0]}, have other settings than [optimizer] gives them"
        remarks.append(f"{what}: norms do not decay here, and [[optimizer.groups]] sets the others")
    decoupled = f"{GROUPS}{EMBEDDING}.decoupled_weight_decay"
    if first["weight_decay"] and decoupled in found.objects and not found.read_value(decoupled):
        remarks.append("weight decay was a part of the gradient, as in Adam: here it is decoupled, as in AdamW")
    return first, remarks


def _step(found: DcpFolder) -> int:
    """The step of a folder. Raises: CheckpointError unless all parts of the state are of one step"""
    steps = {name: found.read_value(name) for name in (STEP, LAST_EPOCH)}
    steps |= {name: found.read(name).item() for name in found.tensors if name.endswith(".step")}
    for name, step in steps.items():
        if step != steps[STEP]:
            what = f"{found.folder}: {name} is {step:g}, {STEP} is {steps[STEP]}"
            raise CheckpointError(what, hint="learning rate and bias correction are functions of one step here")
    return int(steps[STEP])


def export_checkpoint(source: Location, output: Path) -> list[str]:
    """Make a folder of torchtitan 0.3 of a checkpoint; of the weights alone if it has no moments of AdamW.

    Raises: CheckpointError if the checkpoint is unreadable, or torchtitan has no such model; OSError if `output` cannot
        be written
    """
    weights = open_weights(source)
    model, facts = weights.model, weights.saved.facts
    moments = weights.have(MOMENTS) and facts.config["optimizer"]["name"] == "adamw"
    states = states_of(model, moments=moments)

    def items() -> Iterator[tuple[str, Any]]:
        for kind, places in states.items():
            read = replace(weights, prefixes=(kind,)).read
            yield from ((name, maps.assemble(parts, read)) for name, parts in maps.parts_by_name(model, places).items())
        if model.tie_embeddings:
            yield HEAD, weights.read(TOKEN_EMBEDDING)
        if moments:
            yield from _run_items(facts, maps.parts_by_name(model, _places(model, fused=True)))

    with atomic_folder(output) as folder:
        write_dcp(folder, items(), ("optimizer", "train_state", "lr_scheduler"))
    if not moments:
        return ["weights alone: the checkpoint has no moments of AdamW"]
    return [
        "torchtitan reads the folder with --checkpoint.exclude_from_loading dataloader, and decays norms unless a "
        "parameter group of theirs has weight_decay 0"
    ]


def _run_items(facts: manifest.Facts, parameters: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the parameters, of which norms do not decay, and the place of the run."""
    step, config = facts.progress.step, facts.config
    optimizer, batch = OptimizerConfig(**config["optimizer"]), config.get("batch") or {}
    sizes = batch_sizes(BatchConfig(**batch)) if batch.get("rampup") else None
    rate = learning_rate(optimizer, planned_steps(facts), sizes)
    lr, eps, betas = rate(step + 1), optimizer.eps, (optimizer.betas[0], optimizer.betas[1])
    made = torch.optim.AdamW([torch.zeros(1)], lr=lr, betas=betas, eps=eps, foreach=False, fused=True)
    group = {key: value for key, value in made.param_groups[0].items() if key != "params"}
    for theirs in parameters:
        yield f"{STATE}{theirs}.step", torch.tensor(float(step))
        decay = 0.0 if "norm" in theirs else optimizer.weight_decay
        settings = group | {"initial_lr": optimizer.lr, "weight_decay": decay}
        yield from ((f"{GROUPS}{theirs}.{key}", value) for key, value in settings.items())
    replicas = facts.layout.get("dp", 1) * facts.layout.get("cp", 1)  # each counts its own tokens
    yield from ((STEP, step), (TOKENS, int(facts.progress.tokens) // replicas), (LAST_EPOCH, step))
