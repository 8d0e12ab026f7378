"""`megascale ckpt`: what checkpoints there are, what is in them, whether they are whole, how two differ; conversion."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.core.errors import CheckpointError, Exit
from megascale.core.files import readable
from megascale.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from megascale.checkpoint import manifest
    from megascale.checkpoint.storage import Location


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    verbs = sub.add_subparsers(dest="verb", metavar="VERB", required=True)
    found = "a checkpoint's folder or URL, or a run's, whose newest is meant"
    listing = verbs.add_parser("list", help="the complete checkpoints of a run, and attempts that did not finish")
    listing.add_argument("run", metavar="RUN", help="a run's folder, or one of checkpoints; a URL")
    show = verbs.add_parser("show", help="what a checkpoint holds")
    show.add_argument("checkpoint", metavar="CHECKPOINT", help=found)
    show.add_argument("--tensors", action="store_true", help="every tensor, not sums over them")
    verify = verbs.add_parser("verify", help="read all of it, and compare with its checksums")
    verify.add_argument("checkpoint", metavar="CHECKPOINT", help=found)
    diff = verbs.add_parser("diff", help="how two checkpoints differ: configuration, tensors, numbers")
    diff.add_argument("first", metavar="CHECKPOINT", help=found)
    diff.add_argument("second", metavar="OTHER")
    for verb in (listing, show, verify, diff):
        verb.add_argument("--json", action="store_true", help="print one JSON object")
    convert = verbs.add_parser("convert", help="a checkpoint to Hugging Face's layout, or weights in that to one")
    convert.add_argument("source", metavar="SOURCE", help=f"{found}; or a folder with a config.json")
    convert.add_argument("output", metavar="OUTPUT", type=_folder, help="a folder that is not there yet")
    convert.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights (as they are)")
    convert.add_argument("--tokenizer", metavar="FILE", type=_file, help="(the one that the run was trained with)")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status: for `verify` 4 if something is damaged, for `diff` 1 if the two
    differ.
    """
    verbs = {"list": _list, "show": _show, "verify": _verify, "diff": _diff, "convert": _convert}
    try:
        return verbs[options.verb](options)
    except OSError as error:
        mend = "its name, who may read it, the network"
        raise CheckpointError(f"{error.filename}: {error.strerror}", mend=mend) from None


def _say(options: argparse.Namespace, facts: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(facts) if options.json else "\n".join(lines))


def _list(options: argparse.Namespace) -> int:
    from megascale.checkpoint import manifest, store
    from megascale.checkpoint.storage import Location

    run = Location(options.run)
    folder = run / "checkpoints" if (run / "checkpoints").is_folder() else run
    if not folder.is_folder():
        raise CheckpointError(f"there is no folder {folder}", mend="a run's folder")
    if (folder / manifest.NAME).exists():
        raise CheckpointError(f"{folder} is itself a checkpoint", mend=f"megascale ckpt show {folder}")
    rows = []
    for stored in store.complete(folder):
        row: dict[str, Any] = {"path": str(stored.path), "step": stored.step, "bytes": stored.path.size()}
        try:
            facts = manifest.read(stored.path).facts
            row |= {"tokens": facts.progress.tokens, "layout": facts.layout}
        except CheckpointError as error:
            row["error"] = error.what
        rows.append(row)
    unfinished = [str(attempt.path) for attempt in store.unfinished(folder)]
    lines = [
        f"{row['path']}  {format_bytes(row['bytes'])}  "
        + (row.get("error") or f"{format_count(row['tokens'])} tokens, {_layout(row['layout'])}")
        for row in rows
    ]
    lines += [
        f"{path}  did not finish, or is being written: the next start of the run removes it" for path in unfinished
    ]
    _say(options, {"checkpoints": rows, "unfinished": unfinished}, lines or [f"no checkpoints in {folder}"])
    return Exit.OK


def _show(options: argparse.Namespace) -> int:
    path, saved = _opened(options.checkpoint)
    facts = saved.facts
    progress = facts.progress
    kinds: dict[str, tuple[int, int]] = {}
    for name, tensor in saved.tensors.items():
        count, numbers = kinds.get(name.partition(".")[0], (0, 0))
        kinds[name.partition(".")[0]] = count + 1, numbers + math.prod(tensor.shape)
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    lines = [
        f"{path}: {format_bytes(sum(file.bytes for file in saved.files.values()))} in {_files(saved)}",
        f"run         {facts.config.get('name', '-')}, written on {facts.host} by {versions}",
        f"progress    step {progress.step}, {format_count(progress.samples)} samples, "
        f"{format_count(progress.tokens)} tokens",
        f"layout      {_layout(facts.layout)}",
        *(f"{kind:<11} {count} tensors, {format_count(numbers)} numbers" for kind, (count, numbers) in kinds.items()),
    ]
    if options.tensors:
        lines += [
            f"{name}  {tensor.dtype} {list(tensor.shape)} in {len(tensor.boxes)} boxes"
            for name, tensor in saved.tensors.items()
        ]
    _say(options, {"path": str(path)} | saved.model_dump(mode="json"), lines)
    return Exit.OK


def _verify(options: argparse.Namespace) -> int:
    from megascale.checkpoint import manifest, whole
    from megascale.checkpoint.storage import Location

    path = whole.find(Location(options.checkpoint))
    try:
        saved = manifest.read(path)
        problems = list(whole.verify(path, saved))
        good = f"{path}: {len(saved.tensors)} tensors in {_files(saved)} are what was written"
    except manifest.DamagedError as error:
        problems, good = [error.what], ""
    lines = [*problems, f"{path} is damaged"] if problems else [good]
    _say(options, {"path": str(path), "ok": not problems, "problems": problems}, lines)
    return Exit.CHECKPOINT if problems else Exit.OK


def _diff(options: argparse.Namespace) -> int:
    (first, ours), (second, theirs) = _opened(options.first), _opened(options.second)
    facts = _facts_differ(_flat(ours.facts.model_dump(mode="json")), _flat(theirs.facts.model_dump(mode="json")))
    numbers = {}
    for name in ours.tensors.keys() | theirs.tensors.keys():
        if found := _tensors_differ((first, ours), (second, theirs), name):
            numbers[name] = found
    lines = [*(f"{key}: {text}" for key, text in facts.items()), *(f"{n}: {numbers[n]}" for n in sorted(numbers))]
    same = len(ours.tensors.keys() | theirs.tensors.keys()) - len(numbers)
    lines.append(f"{same} tensors are equal to the bit, {len(numbers)} are not")
    _say(options, {"facts": facts, "tensors": numbers, "equal": same}, lines)
    return Exit.UNCLASSIFIED if numbers else Exit.OK


def _facts_differ(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, str]:
    missing = "-"
    return {
        key: f"{ours.get(key, missing)} -> {theirs.get(key, missing)}"
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key, missing) != theirs.get(key, missing)
    }


def _tensors_differ(
    ours: tuple[Location, manifest.Manifest], theirs: tuple[Location, manifest.Manifest], name: str
) -> str:
    """How a tensor differs; "" if it does not."""
    import torch

    from megascale.checkpoint import whole

    for path, saved in (ours, theirs):
        if name not in saved.tensors:
            return f"not in {path}"
    mine, other = ours[1].tensors[name], theirs[1].tensors[name]
    if mine.shape != other.shape:
        return f"shape {list(mine.shape)} -> {list(other.shape)}"
    first, second = (whole.read_tensor(path, saved, name) for path, saved in (ours, theirs))
    kind = "" if first.dtype == second.dtype else f"{mine.dtype} -> {other.dtype}; "
    if not kind and first.view(torch.uint8).equal(second.view(torch.uint8)):
        return ""
    wide = first.double()
    gap, top = (wide - second.double()).abs().max().item(), wide.abs().max().item()
    return f"{kind}largest difference {gap:.3g}, of numbers up to {top:.3g}"


def _convert(options: argparse.Namespace) -> int:
    from megascale.checkpoint import manifest, whole
    from megascale.checkpoint.storage import Location
    from megascale.convert import conversion
    from megascale.convert.huggingface import CONFIG

    dtype = conversion.DTYPES.get(options.dtype)
    folder, warning = Location(options.source).local, ""
    try:
        if folder and (folder / CONFIG).is_file() and not (folder / manifest.NAME).is_file():
            conversion.from_huggingface(folder, options.output, dtype)
        else:
            source = whole.find(Location(options.source))
            warning = conversion.to_huggingface(source, options.output, dtype, options.tokenizer)
    except OSError as error:
        where = f" {error.filename}:" if error.filename and str(error.filename) != str(options.output) else ""
        what = f"cannot convert into {options.output}:{where} {error.strerror}"
        raise CheckpointError(what, mend="another folder, or more space") from None
    if warning:
        print(f"WARNING: {warning}", file=sys.stderr)
    print(f"{options.output}: {format_bytes(Location(str(options.output)).size())}")
    return Exit.OK


def _folder(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a URL: give a folder of this host, and copy it from there")
    return Path(text)


def _file(text: str) -> Path:
    if not readable(text):
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def _opened(path: str) -> tuple[Location, manifest.Manifest]:
    from megascale.checkpoint import manifest, whole
    from megascale.checkpoint.storage import Location

    found = whole.find(Location(path))
    return found, manifest.read(found)


def _files(saved: manifest.Manifest) -> str:
    return f"{len(saved.files)} file{'s' if len(saved.files) > 1 else ''}"


def _layout(layout: dict[str, int]) -> str:
    return " ".join(f"{name}{size}" for name, size in layout.items()) or "-"


def _flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The leaves of a tree by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found
