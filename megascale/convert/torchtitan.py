"""Checkpoints of torchtitan's Llama 3 and dense Qwen 3, read and written: weights, AdamW's moments and the step.

Versions 0.2 and 0.3 are read, and 0.3 is written, which has the moments of q, k and v of a layer in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.checkpoint import offline
from megascale.checkpoint.format import manifest
from megascale.checkpoint.format.state import Progress
from megascale.config.batch_rampup import batch_sizes
from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.config.train import BatchConfig, OptimizerConfig
from megascale.convert.dcp import DcpFolder, write_dcp
from megascale.convert.families.config_json import family_of_model
from megascale.convert.saved_weights import planned_steps, saved_model
from megascale.convert.tensor_map import model_tensors
from megascale.core.errors import CheckpointError
from megascale.core.files import atomic_folder
from megascale.core.storage import Location
from megascale.layout.tensors import TOKEN_EMBEDDING
from megascale.optim.lr import learning_rate
from megascale.parallel.stateful import WEIGHTS

MODULES = {
    "embedding.token": "tok_embeddings", "final_norm": "norm", "head": "lm_head", "attention_norm": "attention_norm",
    "attention.q": "attention.qkv_linear.wq", "attention.k": "attention.qkv_linear.wk",
    "attention.v": "attention.qkv_linear.wv", "attention.q_norm": "attention.q_norm",
    "attention.k_norm": "attention.k_norm", "attention.out": "attention.wo", "mlp_norm": "ffn_norm",
    "mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2",
}  # fmt: skip
"""Module of the model, or of a layer -> module of torchtitan 0.3."""

EMBEDDING, HEAD = "tok_embeddings.weight", "lm_head.weight"
OLDER = {"lm_head.": "output.", ".qkv_linear.": "."}  # parts of names of 0.3 -> of 0.2
QKV = re.compile(r"\.w[qkv]\.")  # part of the names of three tensors whose moments may be in one
ROTATED = re.compile(r"attention\.[qk]\.weight")
"""Tensors whose rows of a head are pairs to rotate: neighbours in torchtitan's Llama 3, halves apart elsewhere."""

STATE, GROUPS = "optimizer.state.", "optimizer.param_groups."
MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = {"initial_lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
"""Key of torch's parameter groups -> key of `[optimizer]`."""

STEP, LAST_EPOCH, TOKENS = "train_state.step", "lr_scheduler.last_epoch", "train_state.ntokens_seen"


class Stored(NamedTuple):
    """A tensor of torchtitan: its name, the kind of state (`weights.`, `exp_avg.`), and the megascale tensors in it."""

    name: str
    kind: str
    parts: list[str]


def parameters(model: ModelConfig, *, fused: bool = False) -> dict[str, list[str]]:
    """The megascale tensors in each parameter of torchtitan 0.3, by its name. `fused`: q, k and v are one parameter.

    Raises: CheckpointError for a model that Llama 3 and Qwen 3 do not compute
    """
    found: dict[str, list[str]] = {}
    family = family_of_model(model).name
    for tensor in model_tensors(model):
        name = re.fullmatch(r"(layers\.\d+\.|)(.+)\.weight", tensor.name)
        if family not in ("llama", "qwen3") or not name or name[2] not in MODULES:
            what = f"torchtitan's Llama 3 and Qwen 3 do not compute the model: {family}, with {tensor.name}"
            raise CheckpointError(what, hint="go through Hugging Face weights: megascale ckpt convert RUN FOLDER")
        theirs = f"{name[1]}{MODULES[name[2]]}.weight"
        found.setdefault(QKV.sub(".wqkv.", theirs) if fused else theirs, []).append(tensor.name)
    return found


def stored_tensors(model: ModelConfig, *, moments: bool, fused: bool = True) -> Iterator[Stored]:
    """Yield the tensors of torchtitan 0.3: weights, and `moments`, which have q, k and v `fused`."""
    for theirs, parts in parameters(model).items():
        yield Stored(theirs, WEIGHTS, parts)
    for theirs, parts in parameters(model, fused=fused).items() if moments else ():
        yield from (Stored(f"{STATE}{theirs}.{kind}", f"{kind}.", parts) for kind in MOMENTS)


def _rotated(model: ModelConfig, name: str, tensor: Tensor, pairs: tuple[int, int]) -> Tensor:
    """Transpose the `pairs` of rows of each head of a tensor that is rotated."""
    if model.qk_norm != "none" or not ROTATED.search(name):
        return tensor
    return tensor.unflatten(0, (-1, *pairs)).transpose(1, 2).flatten(0, 2)


def split(model: ModelConfig, parts: list[str], whole: Tensor) -> list[Tensor]:
    """The megascale tensors `parts` in a tensor of torchtitan."""
    tensors = [whole]
    if len(parts) > 1:  # the heads of q, k and v of a group
        groups = whole.unflatten(0, (model.num_kv_heads, -1, model.head_dim))
        tensors = [heads.flatten(0, 2) for heads in groups.split([groups.shape[1] - 2, 1, 1], 1)]
    pairs = model.head_dim // 2, 2
    return [_rotated(model, name, tensor, pairs) for name, tensor in zip(parts, tensors, strict=True)]


def join(model: ModelConfig, parts: list[str], tensors: list[Tensor]) -> Tensor:
    """A tensor of torchtitan of the megascale tensors `parts`."""
    pairs = 2, model.head_dim // 2
    tensors = [_rotated(model, name, tensor, pairs) for name, tensor in zip(parts, tensors, strict=True)]
    if len(parts) == 1:
        return tensors[0]
    groups = [heads.unflatten(0, (model.num_kv_heads, -1, model.head_dim)) for heads in tensors]
    return torch.cat(groups, 1).flatten(0, 2)


def import_checkpoint(source: Path, output: Path, config: RunConfig | None) -> list[str]:
    """Make a checkpoint of a folder of torchtitan. Without an optimizer's state it is one of weights, at step 0.

    Raises: CheckpointError if the folder is unreadable, or of another model; OSError if `output` cannot be written
    """
    if config is None:
        what = f"torchtitan:{source} does not tell heads, rope and norms of its model"
        raise CheckpointError(what, hint="give --config RUN.toml, of the run that goes on with it")
    found, model = DcpFolder(source), config.model
    moments = any(name.startswith(STATE) for name in found.tensors)
    stored = _checked_tensors(found, model, moments)
    facts = config.model_dump(mode="json", by_alias=True, include={"model", "batch", "train", "optimizer"})
    progress, remarks = Progress(), list[str]()
    if moments:
        settings, remarks = _settings(found)
        facts["optimizer"] |= {"name": "adamw", "options": {}, "groups": []} | settings
        step = _step(found)
        samples = batch_sizes(config.batch).before_step(step + 1)
        progress = Progress(step, samples, samples * model.seq_length)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, kind, parts in stored:
            for part, tensor in zip(parts, split(model, parts, found.read(name)), strict=True):
                yield kind + part, tensor

    with atomic_folder(output) as folder:
        offline.write_state(folder, tensors(), facts, progress=progress)
    if any(name.startswith("dataloader.") for name in found.objects):
        remarks.append("the place in torchtitan's data is left out: the run goes on after step x batch.global samples")
    return remarks


def _checked_tensors(found: DcpFolder, model: ModelConfig, moments: bool) -> list[Stored]:
    """The tensors by their names in a folder. Raises: CheckpointError unless they are all those of the model"""
    older = "layers.0.attention.wq.weight" in found.tensors
    fused = any(".wqkv." in name for name in found.tensors)

    def there(name: str) -> str:
        for part, before in OLDER.items() if older else ():
            name = name.replace(part, before)
        return name

    stored = [each._replace(name=there(each.name)) for each in stored_tensors(model, moments=moments, fused=fused)]
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(model)}
    for name, _, parts in stored:
        expected = (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
        shape = found.tensors[name].shape if name in found.tensors else None
        if shape != expected:
            has = f"has no tensor {name}" if shape is None else f"{name} has shape {list(shape)}"
            what = f"{found.folder}: {has}, {list(expected)} by the configuration"
            raise CheckpointError(what, hint="the [model] of the run that wrote the checkpoint")
    unknown = found.tensors.keys() - {each.name for each in stored}
    unknown -= {name for name in unknown if name.startswith(STATE) and name.endswith(".step")}
    if model.tie_embeddings and (head := there(HEAD)) in unknown and found.read(head).equal(found.read(EMBEDDING)):
        unknown.remove(head)
    if unknown:
        listed = ", ".join(sorted(unknown)[:3])
        what = f"{found.folder} has {len(unknown)} tensors that are not of the configuration's model: {listed}"
        raise CheckpointError(what, hint="the [model] of the run that wrote the checkpoint")
    return stored


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
    saved = manifest.read(source)
    model = saved_model(source, saved)
    names = [f"{kind}.{tensor.name}" for tensor in model_tensors(model) for kind in MOMENTS]
    moments = all(name in saved.tensors for name in names) and saved.facts.config["optimizer"]["name"] == "adamw"
    stored = list(stored_tensors(model, moments=moments))

    def items() -> Iterator[tuple[str, Any]]:
        for name, kind, parts in stored:
            tensors = [offline.read_tensor(source, saved, kind + part) for part in parts]
            yield name, join(model, parts, tensors)
        if model.tie_embeddings:
            yield HEAD, offline.read_tensor(source, saved, WEIGHTS + TOKEN_EMBEDDING)
        if moments:
            yield from _run_items(saved.facts, parameters(model, fused=True))

    with atomic_folder(output) as folder:
        write_dcp(folder, items(), ("optimizer", "train_state", "lr_scheduler"))
    if not moments:
        return ["weights alone: the checkpoint has no moments of AdamW"]
    return [
        "torchtitan reads the folder with --checkpoint.exclude_from_loading dataloader, and decays norms unless a "
        "parameter group of theirs has weight_decay 0"
    ]


def _run_items(facts: manifest.Facts, parameters: dict[str, list[str]]) -> Iterator[tuple[str, Any]]:
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
