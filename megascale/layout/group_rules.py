"""Rules of `[[optimizer.groups]]`, options of optimizers and `train.freeze`, which need the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.train import OptimizerConfig
from megascale.layout.freezing import matches
from megascale.layout.param_groups import ParamGroup, ParamGroups
from megascale.layout.parameters import all_params, pipeline_vocabulary

MOST = 2**40  # numbers among a rule's options are less


def group_findings(model: ModelConfig, config: OptimizerConfig, *, shared: bool = False) -> Iterator[Finding]:
    """Check options, and that every tensor of the model belongs to one group whose rule can update it. `shared`: the
    pipeline's stages share the rows of embedding and head.
    """
    groups = ParamGroups(config)
    for parameter in pipeline_vocabulary(model) if shared else ():
        group = groups.group_of(parameter, parameter.parts[0])
        if group.needs_matrix:
            message = f"{group.rule} updates {parameter.name} as a whole, and stages share its rows"
            yield Finding("parallel.vocab_pp", message, "adamw for it, or vocab_pp = 0")
    yield from _option_findings("optimizer.options", groups.default, config.options)
    for group, table in zip(groups.listed, config.groups, strict=True):
        yield from _option_findings("optimizer.groups", group, table.get("options", {}))
    if model.mup_base_width and "lamb" in groups.rules:
        message = "has no effect with lamb, whose updates have the size of the weights"
        yield Finding("model.mup_base_width", message, "another rule, or remove the key")
    if model.unit_scaling:
        for group in (groups.default, *groups.listed):
            if group.rule == "lamb" or group.width_power != 1:
                message = f"{group.rule}'s updates do not have elements of a fixed size, as unit scaling's rates need"
                yield Finding("model.unit_scaling", message, "adamw, lion or another rule like Adam")
                return
    if config.groups and "lamb" in groups.rules:
        message = "lamb scales updates by norms of whole parameters, of all of them or of none"
        yield Finding("optimizer.groups", message, "another rule, or no groups")
        return
    yield from _match_findings(model, groups, config.groups)


def _match_findings(model: ModelConfig, groups: ParamGroups, tables: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Check which tensors of a model the groups match."""
    used, decayed = set[int](), set[int]()
    for parameter in all_params(model) if tables else []:
        for tensor in parameter.parts:
            found = groups.matches(parameter, tensor)
            used.update(found)
            decayed.update(found if parameter.weight_decay else ())
            if len(found) > 1:
                numbers = " and ".join(str(index + 1) for index in found)
                yield Finding("optimizer.groups", f"{tensor.name} is in groups {numbers}", "narrower params or kinds")
                return
            group = groups.group_of(parameter, tensor)
            if group.needs_matrix and not parameter.is_matrix:
                message = f"{tensor.name} is no matrix, and {group.rule} updates matrices"
                yield Finding("optimizer.groups", message, "kinds of matrices, or another rule for the group")
                return
    for index, table in enumerate(tables):
        if index not in used:
            message = f"group {index + 1} matches no parameter"
            yield Finding("optimizer.groups", message, _meant_params(model, table))
        elif table.get("weight_decay") and index not in decayed:
            message = f"weight_decay of group {index + 1} has no effect: norms and biases do not decay"
            yield Finding("optimizer.groups", message, "remove the key, or other parameters")


def _meant_params(model: ModelConfig, table: Mapping[str, Any]) -> str:
    """Return a hint for a group that matches no parameter: the parts of a fused weight that it names."""
    fused = [parameter for parameter in all_params(model) if len(parameter.parts) > 1]
    for parameter in fused:
        if any(fnmatchcase(parameter.name, pattern) for pattern in table.get("params", ())):
            return f"{parameter.name} is fused: its parts are {', '.join(part.name for part in parameter.parts)}"
    return "patterns of names as in `megascale ckpt show`, or other kinds"


def freeze_findings(model: ModelConfig, patterns: Sequence[str]) -> Iterator[Finding]:
    """Check that every pattern matches, that no weight is frozen in part, and that some parameter is trained."""
    key, weights = "train.freeze", [[tensor.name for tensor in parameter.parts] for parameter in all_params(model)]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for names in weights for name in names):
            yield Finding(key, f"{pattern} matches no parameter", "patterns of names as in `megascale ckpt show`")
    trained = [[name for name in names if not matches(name, patterns)] for names in weights]
    for names, others in zip(weights, trained, strict=True):
        if 0 < len(others) < len(names):
            found, rest = next(name for name in names if name not in others), ", ".join(others)
            message = f"{found} is in one weight with {rest}, which is trained or frozen as a whole"
            yield Finding(key, message, f"also {rest}, or none of them")
            return
    if not any(trained):
        yield Finding(key, "all parameters are frozen: nothing is trained", "fewer patterns")


def _option_findings(where: str, group: ParamGroup, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the names, types and ranges of a rule's options."""
    known = group.facts["options"]
    words = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}
    for key, value in options.items():
        if key not in known:
            hint = f"its options: {', '.join(known) or 'none'}"
            if group.meaning == "moments":
                hint = "keys of [optimizer]: optimizer.betas, optimizer.eps, optimizer.bias_correction"
            yield Finding(where, f"{group.rule} has no option {key}", hint)
            continue
        default, choices = known[key], group.facts["choices"].get(key)
        hint = f"{key} = {str(default).lower()}, the default"
        if type(value) is not type(default) and (type(value), type(default)) != (int, float):
            yield Finding(where, f"{group.rule}: {key} is {value!r}, not {words[type(default)]}", hint)
        elif choices and value not in choices:
            yield Finding(where, f"{group.rule}: {key} is {value!r}", f"one of {', '.join(choices)}")
        elif isinstance(default, int | float) and not _in_range(key, value, type(default)):
            yield Finding(where, f"{group.rule}: {key} is {value}, out of range", hint)


def _in_range(key: str, value: Any, kind: type) -> bool:
    """True if whole numbers are above 0, other numbers at least 0, what decays an average less than 1, a share above 0
    and at most 1, and a threshold and what is added to a root above 0.
    """
    if kind is bool:
        return True
    if kind is int:
        return bool(1 <= value < MOST)
    if key == "density" or key.startswith("eps"):
        return bool(0 < value <= 1)
    if key == "clip_threshold":
        return bool(0 < value < MOST)
    return bool(0 <= value < (1 if key.startswith(("beta", "momentum")) else MOST))
