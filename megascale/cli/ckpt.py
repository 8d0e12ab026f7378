"""`megascale ckpt`: list, show, verify, diff, convert and grow checkpoints, print `[model]`, free copies."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.cli.arguments import add_json, add_run, checked, local_path, read_digits
from megascale.cli.command_output import OutputError, warn
from megascale.cli.run_location import run_location
from megascale.config.loading import load_config
from megascale.config.toml_reader import dotted
from megascale.core.errors import CheckpointError, ConfigError, Exit, MegascaleError, Problem
from megascale.core.files import SHARED_MEMORY, exists, why_unreadable, write_text
from megascale.core.storage import Location
from megascale.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from megascale.checkpoint.format import manifest


EXPERTS = checked("a number of experts from 1 to 65536", read_digits, lambda number: 0 < number <= 1 << 16)

SHARE = checked("a share above 0 and below 1", float, lambda number: 0 < number < 1)

CHECKPOINT = "folder or URL of a checkpoint, or of a run (its newest checkpoint)"


def _add_list(sub: argparse.ArgumentParser) -> None:
    add_run(sub, "folder or URL of a run, or of its checkpoints")
    add_json(sub)


def _add_show(sub: argparse.ArgumentParser) -> None:
    _add_verify(sub)
    sub.add_argument("--tensors", action="store_true", help="list every tensor instead of totals")


def _add_verify(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    add_json(sub)


def _add_diff(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("first", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("second", metavar="OTHER", help="the checkpoint, or run, to compare it with")
    add_json(sub)


def _add_copies(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run", metavar="RUN", nargs="?", type=Path, help="the run's folder (default: of all runs)")
    remove = "remove those of RUN, by default of all runs whose folders are gone"
    sub.add_argument("--remove", action="store_true", help=remove)
    memory = f"folder of the copies of all runs (default: {SHARED_MEMORY})"
    sub.add_argument("--memory-dir", metavar="DIR", type=Path, default=SHARED_MEMORY, help=memory)
    add_json(sub)


def _add_model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", metavar="SOURCE", help=f"{CHECKPOINT}; or of Hugging Face weights")
    sub.add_argument("--output", metavar="FILE.toml", type=Path, help="write a TOML file instead, for `extends`")


def _add_convert(sub: argparse.ArgumentParser) -> None:
    others = "SYSTEM:FOLDER, such as torchtitan:outputs/checkpoint/step-1000"
    sub.add_argument("source", metavar="SOURCE", help=f"{CHECKPOINT}; or of Hugging Face weights; or {others}")
    sub.add_argument("output", metavar="DIR", type=local_path, help=f"a new folder for the result, or {others}")
    config = "of SYSTEM:FOLDER: configuration of the run that goes on with it, which has the model and the batch"
    sub.add_argument("--config", metavar="FILE.toml", help=config)
    sub.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the weights (default: unchanged)")
    tokenizer = "tokenizer of the result (default: the tokenizer of the training run)"
    sub.add_argument("--tokenizer", metavar="FILE", type=_file, help=tokenizer)
    average = "convert the average of the weights (train.weight_average), not the weights"
    sub.add_argument("--average", action="store_true", help=average)
    experts = "make a checkpoint of a dense model with N experts in place of each MLP, K for a token (upcycling)"
    sub.add_argument("--experts", metavar=("N", "K"), nargs=2, type=EXPERTS, help=experts)
    sub.add_argument("--eod", metavar="TOKEN", help="token that ends a text (default: that of the training data)")


def _add_grow(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", metavar="FROM", help=CHECKPOINT)
    sub.add_argument("config", metavar="TO.toml", help="configuration of the run that goes on, with the larger model")
    sub.add_argument("output", metavar="DIR", type=local_path, help="a new folder for the result")


def _add_spectrum(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", metavar="CHECKPOINT", help=CHECKPOINT)
    top = "share of the weights of each kind that are trained, those with the largest SNR (default: 0.5)"
    sub.add_argument("--top", metavar="SHARE", type=SHARE, default=0.5, help=top)
    output = "write [train] with freeze, the weights that are not, for `extends`"
    sub.add_argument("--output", metavar="FILE.toml", type=local_path, help=output)
    add_json(sub)


def _say(options: argparse.Namespace, facts: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(facts) if options.json else "\n".join(lines))


def _list(options: argparse.Namespace) -> int:
    from megascale.checkpoint import folders
    from megascale.checkpoint.format import manifest

    run = run_location(options.run)
    folder = run / "checkpoints" if (run / "checkpoints").is_folder() else run
    if (folder / manifest.NAME).exists():
        raise CheckpointError(f"{folder} is itself a checkpoint", hint=f"use megascale ckpt show {folder}")
    rows, lines = list[dict[str, Any]](), list[str]()
    for stored in folders.complete_checkpoints(folder):
        row: dict[str, Any] = {"path": str(stored.path), "step": stored.step, "bytes": stored.path.size()}
        try:
            facts = manifest.read(stored.path).facts
            row |= {"tokens": facts.progress.tokens, "layout": facts.layout}
            about = f"{format_count(facts.progress.tokens)} tokens, {_layout(facts.layout)}"
        except CheckpointError as error:
            about = row["error"] = error.message
        rows.append(row)
        lines.append(f"{row['path']}  {format_bytes(row['bytes'])}  {about}")
    unfinished = [str(attempt.path) for attempt in folders.list_checkpoints(folder, complete=False)]
    lines += [f"{path}  is unfinished, or being written: the next start of the run removes it" for path in unfinished]
    _say(options, {"checkpoints": rows, "unfinished": unfinished}, lines or [f"no checkpoints in {folder}"])
    return Exit.OK


def _show(options: argparse.Namespace) -> int:
    path, saved = _open_checkpoint(options.checkpoint)
    facts = saved.facts
    progress = facts.progress
    kinds: dict[str, tuple[int, int]] = {}
    for name, tensor in saved.tensors.items():
        count, numel = kinds.get(name.partition(".")[0], (0, 0))
        kinds[name.partition(".")[0]] = count + 1, numel + math.prod(tensor.shape)
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    lines = [
        f"{path}: {format_bytes(sum(file.bytes for file in saved.files.values()))} in {_files(saved)}",
        f"run         {facts.config.get('name', '-')}, written on {facts.host} by {versions}",
        f"progress    step {progress.step}, {format_count(progress.samples)} samples, "
        f"{format_count(progress.tokens)} tokens",
        f"layout      {_layout(facts.layout)}",
        *(f"{kind:<11} {count} tensors, {format_count(numel)} elements" for kind, (count, numel) in kinds.items()),
    ]
    if options.tensors:
        lines += [
            f"{name}  {tensor.dtype} {list(tensor.shape)} in {len(tensor.shards)} shards"
            for name, tensor in saved.tensors.items()
        ]
    _say(options, {"path": str(path)} | saved.model_dump(mode="json", by_alias=True), lines)
    return Exit.OK


def _verify(options: argparse.Namespace) -> int:
    from megascale.checkpoint import folders, offline
    from megascale.checkpoint.format import manifest

    path = folders.find_checkpoint(run_location(options.checkpoint))
    try:
        saved = manifest.read(path)
        problems = list(offline.verify(path, saved))
        good = f"{path}: {len(saved.tensors)} tensors in {_files(saved)} match their checksums"
    except manifest.DamagedError as error:
        problems, good = [error.message], ""
    verdict = f"{path} is damaged: a run resumes from an earlier checkpoint"
    if all(offline.TENSORS_INTACT in problem for problem in problems):
        verdict = f"{path} can be loaded: all its tensors are as they were written"
    lines = [*problems, f"{verdict}  -> copy the files anew, or remove the folder"] if problems else [good]
    _say(options, {"path": str(path), "ok": not problems, "problems": problems}, lines)
    return Exit.CHECKPOINT if problems else Exit.OK


def _diff(options: argparse.Namespace) -> int:
    (first, ours), (second, theirs) = _open_checkpoint(options.first), _open_checkpoint(options.second)
    facts = [dotted(saved.facts.model_dump(mode="json")) for saved in (ours, theirs)]
    changed = {
        key: f"{facts[0].get(key, '-')} -> {facts[1].get(key, '-')}"
        for key in dict.fromkeys([*facts[0], *facts[1]])
        if facts[0].get(key, "-") != facts[1].get(key, "-")
    }
    names = ours.tensors.keys() | theirs.tensors.keys()
    compared = {name: _tensors_differ((first, ours), (second, theirs), name) for name in names}
    differences = {name: text for name, text in compared.items() if text}
    same = len(names) - len(differences)
    lines = [f"{key}: {text}" for key, text in [*changed.items(), *sorted(differences.items())]]
    lines.append(f"{same} tensors are bit-equal, {len(differences)} differ")
    _say(options, {"facts": changed, "tensors": differences, "equal": same}, lines)
    return Exit.UNCLASSIFIED if differences else Exit.OK


def _copies(options: argparse.Namespace) -> int:
    from megascale.operate.node.stored_copies import stored_copies

    run, rows = options.run and options.run.resolve(), []
    for one in stored_copies(options.memory_dir):
        if run in (None, one.run):
            removed = options.remove and (one.lost or run is not None) and one.remove()
            row: dict[str, Any] = {"path": str(one.folder), "run": str(one.run), "bytes": one.bytes}
            rows.append(row | {"state": "removed" if removed else one.state})
    lines = [f"{row['path']}  {format_bytes(row['bytes'])}  of {row['run']}: {row['state']}" for row in rows]
    _say(options, {"copies": rows}, lines or [f"no copies in {options.memory_dir}"])
    kept = run is not None and options.remove and any(row["state"] != "removed" for row in rows)
    return Exit.UNCLASSIFIED if kept else Exit.OK


def _tensors_differ(
    ours: tuple[Location, manifest.Manifest], theirs: tuple[Location, manifest.Manifest], name: str
) -> str:
    """Describe how a tensor differs between two checkpoints; "" for bit-equal tensors."""
    import torch

    from megascale.checkpoint import offline

    for path, saved in (ours, theirs):
        if name not in saved.tensors:
            return f"not in {path}"
    mine, other = ours[1].tensors[name], theirs[1].tensors[name]
    if mine.shape != other.shape:
        return f"shape {list(mine.shape)} -> {list(other.shape)}"
    first, second = (offline.read_tensor(path, saved, name) for path, saved in (ours, theirs))
    kind = "" if first.dtype == second.dtype else f"{mine.dtype} -> {other.dtype}; "
    if not kind and first.view(torch.uint8).equal(second.view(torch.uint8)):
        return ""
    wide = first.double()
    gap, top = (wide - second.double()).abs().max().item(), wide.abs().max().item()
    return f"{kind}largest difference {gap:.3g}, largest element {top:.3g}"


def _model(options: argparse.Namespace) -> int:
    from megascale.config.toml_writer import section_to_toml
    from megascale.convert.saved_weights import read_model_section

    text = section_to_toml("model", read_model_section(run_location(options.source)))
    if options.output is None:
        print(text)
    else:
        write_text(options.output, text + "\n")
    return Exit.OK


def _convert(options: argparse.Namespace) -> int:
    from megascale.convert.systems import MARKS, SYSTEMS

    (source, _, folder), (target, _, made) = options.source.partition(":"), str(options.output).partition(":")
    reads, writes = SYSTEMS.get(source), SYSTEMS.get(target)
    output = Path(made) if writes else options.output
    if exists(output):
        raise OutputError(f"{output} is there already", hint="give a new folder for the result")
    if reads and writes:
        raise OutputError(f"{options.source} is no checkpoint of megascale", hint="convert it to one first")
    _refuse_ineffective(options, source if reads else target if writes else "")
    marks = [mark for mark in MARKS if not reads and exists(Path(options.source) / mark)]
    if marks:
        what = f"{options.source} has {marks[0]}, as a folder of another system"
        raise CheckpointError(what, hint=f"write {MARKS[marks[0]]}:{options.source}")
    try:
        if reads:
            config = load_config(options.config, skip_sections=["data"]) if options.config else None
            warnings = reads.read(Path(folder), output, config)
        elif writes:
            from megascale.checkpoint import folders

            warnings = writes.write(folders.find_checkpoint(run_location(options.source)), output)
        else:
            warnings = _convert_huggingface(options)
    except OSError as error:
        where = f" {error.filename}:" if error.filename and str(error.filename) != str(output) else ""
        message = f"cannot convert into {output}:{where} {error.strerror}"
        raise CheckpointError(message, hint="give another folder, or free disk space") from None
    warn(warnings)
    print(f"{output}: {format_bytes(Location(str(output)).size())}")
    return Exit.OK


def _refuse_ineffective(options: argparse.Namespace, system: str) -> None:
    """Raise ConfigError for an option that a conversion does not read. `system`: the prefix of a folder, if any."""
    unread = ("dtype", "tokenizer", "average", "experts", "eod") if system else ("config",)
    if given := [f"--{name}" for name in unread if getattr(options, name)]:
        what = f"no effect with {system}:FOLDER" if system else "no effect without SYSTEM:FOLDER"
        raise ConfigError([Problem("command line", given[0], what, "leave it out")])


def _convert_huggingface(options: argparse.Namespace) -> list[str]:
    """Convert from or to Hugging Face weights, or dense to experts. Returns what the result lacks, a line each."""
    from megascale.checkpoint import folders
    from megascale.convert import conversion
    from megascale.convert.huggingface import weights_folder

    dtype, to = (
        conversion.DTYPES.get(options.dtype),
        conversion.Upcycling(*options.experts) if options.experts else None,
    )
    location = run_location(options.source)
    if folder := weights_folder(location.local_path):
        if options.average:
            raise CheckpointError(f"{folder} has no average of the weights", hint="leave out --average")
        conversion.from_huggingface(folder, options.output, dtype, to)
        return []
    source = folders.find_checkpoint(location)
    if to is not None:
        conversion.upcycle(source, options.output, to, dtype, options.average)
        return []
    return conversion.to_huggingface(source, options.output, dtype, options.tokenizer, options.eod, options.average)


def _grow(options: argparse.Namespace) -> int:
    from megascale.checkpoint import folders
    from megascale.convert.growth import grow

    if exists(options.output):
        raise OutputError(f"{options.output} is there already", hint="give a new folder for the result")
    config = load_config(options.config, skip_sections=["data"])
    source = folders.find_checkpoint(run_location(options.source))
    warn(grow(source, options.output, config.model, config.train.seed, options.config))
    print(f"{options.output}: {format_bytes(Location(str(options.output)).size())}")
    return Exit.OK


def _spectrum(options: argparse.Namespace) -> int:
    from megascale.checkpoint import folders
    from megascale.config.toml_writer import section_to_toml
    from megascale.convert.spectrum import frozen_tensors, measure

    kinds = measure(folders.find_checkpoint(run_location(options.source)))
    frozen = frozen_tensors(kinds, options.top)
    if options.output is not None:
        write_text(options.output, section_to_toml("train", {"freeze": frozen}) + "\n")
    snr = {name: value for weights in kinds.values() for names, value in weights.items() for name in names}
    lines = [f"{value:8.3g} {' ' if name in frozen else '*'} {name}" for name, value in snr.items()]
    _say(options, {"snr": snr, "freeze": frozen}, [*lines, "SNR of each weight; *: trained, the others freeze"])
    return Exit.OK


def _file(text: str) -> Path:
    if reason := why_unreadable(text):
        raise argparse.ArgumentTypeError(reason)
    return Path(text)


def _open_checkpoint(path: str) -> tuple[Location, manifest.Manifest]:
    from megascale.checkpoint import folders
    from megascale.checkpoint.format import manifest

    location = folders.find_checkpoint(run_location(path))
    return location, manifest.read(location)


def _files(saved: manifest.Manifest) -> str:
    return f"{len(saved.files)} file{'s' if len(saved.files) > 1 else ''}"


def _layout(layout: dict[str, int]) -> str:
    return " ".join(f"{name}{size}" for name, size in layout.items()) or "-"


def _explained(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return `run` with an explanation of errors of a file system. Its status: 4 if `verify` finds damage, 1 if `diff`
    finds a difference, or if copies in use were to be removed.
    """

    def explained(options: argparse.Namespace) -> int:
        try:
            return run(options)
        except OSError as error:
            if isinstance(error, MegascaleError | BrokenPipeError):
                raise
            hint = "check its name, its permissions and the network"
            raise CheckpointError(f"{error.filename}: {error.strerror}", hint=hint) from None

    return explained


VERBS = {
    "list": (_add_list, _explained(_list)),
    "show": (_add_show, _explained(_show)),
    "verify": (_add_verify, _explained(_verify)),
    "diff": (_add_diff, _explained(_diff)),
    "copies": (_add_copies, _explained(_copies)),
    "model": (_add_model, _explained(_model)),
    "convert": (_add_convert, _explained(_convert)),
    "grow": (_add_grow, _explained(_grow)),
    "spectrum": (_add_spectrum, _explained(_spectrum)),
}
