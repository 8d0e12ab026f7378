"""The commands of `megascale`, in groups, with a line of help, an example and a page each; those that are gone; and
options that other tools have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command of one or two words, in the module of `megascale.cli` that has its words as its name.

    `example`: the words after `megascale`. `module`: another module, whose `VERBS` has the command's second word.
    """

    help: str
    example: str
    page: str
    module: str = ""


GROUPS = {
    "Configure": ("import-config", "check", "plan", "doctor"),
    "Train": ("quickstart", "train", "launch", "sites"),
    "Look at a run": ("watch", "diagnose", "trace", "events", "dashboard"),
    "Data and weights": ("data", "ckpt", "sample"),
    "Measure": ("bench",),
}
"""Commands of one word, as `megascale --help` lists them."""

FAMILIES = ("data", "ckpt", "bench")
"""Words that are a command only with a second word."""

HIDDEN_COMMANDS = ("agent", "collect", "driver", "standby")  # commands that other commands start

LLAMA = "configs/gpu/llama3-8b.toml"

COMMANDS = {
    "import-config": Command(
        "translate a script of Megatron-LM or a configuration of torchtitan, and say what differs",
        "import-config torchtitan:llama3_8b --gpus 64 --output llama3-8b.toml",
        "docs/from-megatron.md",
    ),
    "check": Command(
        "find every mistake of a configuration, without launching anything",
        f"check {LLAMA} --gpus 64 parallel.tp=4",
        "docs/configuration.md",
    ),
    "plan": Command(
        "estimate memory, step time and MFU of a run before a device is booked",
        f"plan {LLAMA} --gpus 64 --hardware h100",
        "docs/planning.md",
    ),
    "plan lengths": Command(
        "plan steps of sequences of unequal lengths: static cp, hybrid data parallelism, and chunks",
        f"plan lengths {LLAMA} --gpus 64 --hardware h100 --lengths lognormal:median=1000,sigma=1.8",
        "docs/long-context.md",
    ),
    "plan batch": Command(
        "plan the global batch: the critical batch, a ramp-up, and what a batch costs",
        f"plan batch {LLAMA} --gpus 64 --tokens 300e9",
        "docs/planning.md",
    ),
    "plan precision": Command(
        "compare formats of GEMMs by a law of the loss: what they add, and from how many tokens on more tokens harm",
        f"plan precision {LLAMA} --tokens 300e9",
        "docs/low-precision.md",
    ),
    "doctor": Command(
        "describe this machine and the backend of each operation, and test the backends",
        "doctor train.precision=bf16",
        "docs/backends.md",
    ),
    "doctor nodes": Command(
        "compare the nodes of a job and the links between them, to find the bad one",
        "doctor nodes --processes 3",
        "docs/node-checks.md",
    ),
    "quickstart": Command(
        "train a small GPT on real text in 3D parallelism, on this machine",
        "quickstart",
        "docs/first-hour.md",
    ),
    "train": Command(
        "train as a rank of torchrun or srun, or launch the ranks on this host",
        "train configs/quickstart.toml name=first train.steps=20",
        "docs/launch.md",
    ),
    "launch": Command(
        "train with a driver, agents and spare nodes: a job that survives faults",
        "launch configs/quickstart.toml name=second --nodes 2 --spares 1",
        "docs/launch.md",
    ),
    "sites": Command(
        "serve the meeting point of jobs that train one model across sites",
        "sites 10.0.0.5:7100",
        "docs/sites.md",
    ),
    "watch": Command(
        "show the live state of every rank of a run in the terminal, or attach to a job of torchrun or srun",
        "watch runs/quickstart",
        "docs/watch.md",
    ),
    "diagnose": Command(
        "say whether a run hangs, which rank the others wait for, and why; what slows it; where its MFU goes",
        "diagnose runs/quickstart --slow",
        "docs/slow-runs.md",
    ),
    "trace": Command(
        "merge the event logs of a run's ranks into one timeline for Perfetto",
        "trace runs/quickstart --ranks 0-3",
        "docs/trace.md",
    ),
    "events": Command(
        "query a run's event store: every event, step and state of every rank",
        "events runs/quickstart slowest-ranks",
        "docs/event-store.md",
    ),
    "dashboard": Command(
        "show runs as a web page, or write one as an HTML file: curves, heat map, timeline, every rank",
        "dashboard runs/quickstart --file quickstart.html",
        "docs/watch.md",
    ),
    "data": Command(
        "prepare and inspect token datasets",
        "data inspect data/quickstart/train",
        "docs/data.md",
    ),
    "data prepare": Command(
        "tokenize text, .jsonl or .parquet files to a token dataset",
        "data prepare README.md docs --output data/pages --tokenizer bytes",
        "docs/data.md",
    ),
    "data import": Command(
        "convert token files of another project to a token dataset",
        "data import tokens.npy --output data/mine --eod 0",
        "docs/data.md",
    ),
    "data index": Command(
        "build the sample indices of a run in advance",
        "data index configs/quickstart.toml",
        "docs/data.md",
    ),
    "data samples": Command(
        "name the documents that a step of a run has read",
        "data samples runs/quickstart --step 10",
        "docs/data-order.md",
    ),
    "data teacher": Command(
        "write the likeliest tokens of a checkpoint for the samples of a run, to distill from",
        "data teacher configs/quickstart.toml --checkpoint runs/small --output data/teacher.labels",
        "docs/recipes.md",
    ),
    "data inspect": Command(
        "describe a token dataset and show some text",
        "data inspect data/quickstart/train --documents 3",
        "docs/data.md",
    ),
    "ckpt": Command(
        "list, show, verify, compare and convert checkpoints",
        "ckpt list runs/quickstart",
        "docs/checkpointing.md",
    ),
    "ckpt list": Command(
        "list a run's complete checkpoints and its unfinished saves",
        "ckpt list runs/quickstart",
        "docs/checkpointing.md",
        module="ckpt",
    ),
    "ckpt show": Command(
        "describe a checkpoint: progress, layout, tensors",
        "ckpt show runs/quickstart --tensors",
        "docs/checkpointing.md",
        module="ckpt",
    ),
    "ckpt verify": Command(
        "read every file of a checkpoint and compare checksums",
        "ckpt verify runs/quickstart",
        "docs/checkpointing.md",
        module="ckpt",
    ),
    "ckpt diff": Command(
        "compare two checkpoints: configuration, tensors, elements",
        "ckpt diff runs/first runs/second",
        "docs/checkpointing.md",
        module="ckpt",
    ),
    "ckpt copies": Command(
        "list the copies in memory on this host, or free their memory",
        "ckpt copies --remove",
        "docs/checkpointing.md",
        module="ckpt",
    ),
    "ckpt model": Command(
        "print the section [model] of a checkpoint or of Hugging Face weights",
        "ckpt model runs/quickstart",
        "docs/models.md",
        module="ckpt",
    ),
    "ckpt convert": Command(
        "convert a checkpoint to Hugging Face weights or another system's checkpoint, or the reverse",
        "ckpt convert runs/quickstart exported --dtype bf16",
        "docs/models.md",
        module="ckpt",
    ),
    "ckpt grow": Command(
        "make the checkpoint of a wider or deeper model that computes the same function",
        "ckpt grow runs/small large.toml grown",
        "docs/recipes.md",
        module="ckpt",
    ),
    "ckpt spectrum": Command(
        "choose the weights to train further by the signal in their singular values",
        "ckpt spectrum runs/quickstart --top 0.5 --output freeze.toml",
        "docs/recipes.md",
        module="ckpt",
    ),
    "sample": Command(
        "generate text from a checkpoint",
        'sample runs/quickstart --prompt "def main" --tokens 50',
        "docs/models.md",
    ),
    "bench": Command(
        "measure GEMMs, links, training steps and the profile of this machine",
        "bench gemm",
        "docs/performance.md",
    ),
    "bench mfu": Command(
        "time real training steps on one device: tokens/s, MFU, memory, and time by kind of kernel",
        "bench mfu --preset llama3-8b --layers 1 batch.global=1",
        "docs/performance.md",
        module="bench",
    ),
    "bench gemm": Command(
        "measure the GEMM throughput of this device, by shape and dtype",
        "bench gemm --sizes 1024x1024x1024 --dtypes fp32 bf16",
        "docs/performance.md",
        module="bench",
    ),
    "bench links": Command(
        "measure bandwidth and latency of training's collectives and messages between ranks of this host",
        "bench links --processes 2 --sizes 65536",
        "docs/performance.md",
        module="bench_ranks",
    ),
    "bench profile": Command(
        "measure a hardware profile of this machine's processor, for plan --hardware this",
        "bench profile --output this-machine.toml",
        "docs/planning.md",
        module="bench_ranks",
    ),
}
"""Every command that a user types, by its words; a second word stands directly after the first."""

GONE = {
    "observe": "watch RUN --attach",
    "report": "dashboard RUN --file FILE.html",
    "mfu": "diagnose RUN --mfu",
    "data which": "data samples",
    "plan --lengths": "plan lengths CONFIG --lengths",
    "doctor --nodes": "doctor nodes",
}
"""Old commands and options of commands, and what they are now."""

_WITH_SETTINGS = ("check", "plan", "train", "launch", "data index")
_QUERY = 'the query stands without an option: megascale events RUN "SELECT ..."'
_GPUS = "--gpus N, the devices of all nodes: 8 nodes of 8 are --gpus 64"
_RANKS = "torchrun or srun starts the ranks; on one host write parallel.dp=N"
_STEP = "give the checkpoint's folder, such as RUN/checkpoints/step-00000020"
_TOKENIZER = "--tokenizer FILE, a tokenizer.json, or --tokenizer bytes"

ELSEWHERE = {
    **{f"{command} --config": f"the file stands without an option: megascale {command} FILE.toml"
       for command in _WITH_SETTINGS},
    **{f"{command} --dry-run": "megascale check CONFIG, which launches nothing" for command in _WITH_SETTINGS},
    "check --nodes": _GPUS,
    "plan --nodes": _GPUS,
    "train --nodes": "megascale launch CONFIG --nodes N",
    "train --gpus": _RANKS,
    "launch --gpus": "--nodes N, and on each node the layout's ranks: write parallel.dp=N",
    "data prepare --input": "inputs stand without an option: megascale data prepare docs --output PREFIX ...",
    "data prepare --output-prefix": "--output PREFIX",
    "data prepare --json-keys": "--key FIELD, one field",
    "data prepare --append-eod": "nothing to write: always so; --eod TOKEN names another token",
    "data prepare --tokenizer-type": _TOKENIZER,
    "data prepare --tokenizer-model": _TOKENIZER,
    "data prepare --tokenizer-name-or-path": _TOKENIZER,
    "data prepare --vocab-file": _TOKENIZER,
    "data prepare --merge-file": _TOKENIZER,
    "data prepare --vocab-size": "nothing to write: the tokenizer says it",
    "data teacher --top-k": "write train.distill_top_k=K",
    "data prepare --partitions": "nothing to write: --workers N processes share the inputs",
    "data prepare --log-interval": "nothing to write: progress is shown",
    "data prepare --split-sentences": "not supported: documents are whole",
    "ckpt --step": _STEP,
    "sample --step": _STEP,
    "events --sql": _QUERY,
    "events --query": _QUERY,
}  # fmt: skip
"""Options of other tools, behind a command or the first word of several, and what to write."""

COMMANDS_ELSEWHERE = {
    "resume": "megascale train CONFIG, the command that began the run, goes on from its newest checkpoint",
    "export": "megascale ckpt convert CHECKPOINT DIR",
    "convert": "megascale ckpt convert CHECKPOINT DIR",
    "preprocess": "megascale data prepare INPUT --output PREFIX --tokenizer FILE",
    "tokenize": "megascale data prepare INPUT --output PREFIX --tokenizer FILE",
    "generate": "megascale sample CHECKPOINT",
    "validate": "megascale check CONFIG",
    "import": "megascale import-config SCRIPT, or megascale data import INPUT",
}
"""Commands of other tools, and what to write."""


def command_of(words: Sequence[str]) -> str:
    """Return the command that a command line begins with, "" for none."""
    two = " ".join(words[:2])
    known = (*COMMANDS, *HIDDEN_COMMANDS)
    return two if two in COMMANDS else words[0] if words and words[0] in known else ""


def commands_below(command: str) -> list[str]:
    """List the commands whose first word is `command`."""
    return [name for name in COMMANDS if name.startswith(f"{command} ")]


def gone_command(words: Sequence[str]) -> tuple[str, str] | None:
    """Return an old command that a command line has, and the new command; None for a line without one."""
    command = command_of(words) or " ".join(words[:1])
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    for old, new in GONE.items():
        first, _, second = old.partition(" ")
        if old in (" ".join(words[:1]), " ".join(words[:2])) or (first == command and second in given):
            return old, new
    return None


def elsewhere(command: str, word: str) -> str:
    """Return what a command takes in the place of an option of another tool, "" for any other word."""
    option = word.partition("=")[0]
    return ELSEWHERE.get(f"{command} {option}") or ELSEWHERE.get(f"{command.partition(' ')[0]} {option}", "")
