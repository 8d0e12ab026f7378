"""Imports: half of the package never imports torch, and importing a module has no side effects."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import megascale
from tests.runs import GPT, settings, write_config

WITHOUT_TORCH = (
    "core",
    "catalog",
    "config",
    "layout",
    "schedule",
    "operate.channel",
    "operate.diagnose",
    "operate.driver",
    "operate.health",
    "operate.node",
    "operate.store",
    "plan.account",
    "plan.simulate",
    "plan.search",
)
COMMANDS = tuple(
    f"megascale.cli.{name}"
    for name in (
        "main",
        "check",
        "train",
        "bench",
        "data_prepare",
        "data_inspect",
        "trace",
        "doctor",
        "watch",
        "diagnose",
    )
)
KERNELS = dict.fromkeys(
    [
        f"megascale.ops.{name}"
        for name in (
            "cast_transpose",
            "decode_blocks",
            "merge_parts",
            "scaled_wgrad",
            "triton_adamw",
            "triton_cross_entropy",
            "triton_swiglu",
        )
    ],
    "triton",
)
"""Modules in the language of a library (Triton), imported only where the library is installed."""
HEAVY = {"torch", "tensorboard", "transformers", "megatron", "pyarrow", "duckdb", "dash", "plotly"}


NOT_AT_A_START = (
    "torch.distributed.checkpoint",  # a second of CPU, for the first checkpoint on storage
    "torch.distributed.tensor",
    "sympy",  # which torch.autograd.backward would import
    "torch._dynamo",
    "tensorboard",
    "megascale.operate.driver.one_host",
    "megascale.operate.store.collector",
    "megascale.operate.diagnose.slow",
    "megascale.operate.show",
)
"""Modules that a rank does without until it saves: each costs time in every restart of a job."""


def modules(*packages: str) -> list[str]:
    """Return the modules of these packages of megascale, by default of all."""
    found = [info.name for info in pkgutil.walk_packages(megascale.__path__, "megascale.")]
    return [
        name
        for name in found
        if not packages or f"{name}.".startswith(tuple(f"megascale.{each}." for each in packages))
    ]


def after_importing(names: list[str], folder: Path) -> dict[str, list[str]]:
    """Import modules in a new Python; return its packages, output, threads and changes of the environment."""
    code = f"""
import importlib, io, json, os, signal, sys, threading
handlers = lambda: [str(signal.getsignal(n)) for n in signal.valid_signals()]
out, sys.stdout = sys.stdout, io.StringIO()
before, signals = dict(os.environ), handlers()
for name in {names!r}:
    importlib.import_module(name)
changed = sorted(k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k))
json.dump({{
    "packages": sorted({{name.partition(".")[0] for name in sys.modules}}),
    "ours": [name for name in sys.modules if name.startswith("megascale.")],
    "output": [sys.stdout.getvalue()],
    "threads": [t.name for t in threading.enumerate()],
    "environment": changed,
    "signals": [] if signals == handlers() else ["changed"],
    "world": [str(sys.modules["torch.distributed"].is_initialized())] if "torch.distributed" in sys.modules else [],
}}, out)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_modules_below_the_line_do_not_import_torch(tmp_path: Path) -> None:
    names = modules(*WITHOUT_TORCH)
    assert all(modules(room) for room in WITHOUT_TORCH)
    assert not HEAVY & set(after_importing(names, tmp_path)["packages"])


def test_what_people_look_at_does_without_torch(tmp_path: Path) -> None:
    names = [name for name in modules("operate.show") if not name.startswith("megascale.operate.show.web")]
    assert not {"torch", "megatron", "dash"} & set(after_importing(names, tmp_path)["packages"])


def test_commands_answer_without_heavy_packages(tmp_path: Path) -> None:
    """A command that trains imports torch when it runs, on a rank; the rest imports numpy where it computes."""
    assert not HEAVY & set(after_importing(list(COMMANDS), tmp_path)["packages"])


def test_a_launcher_starts_without_numpy(tmp_path: Path) -> None:
    names = [f"megascale.cli.{name}" for name in ("check", "train", "launch", "agent")]
    assert "numpy" not in after_importing(names, tmp_path)["packages"]


DOES_WITHOUT = {
    "megascale.train.step": ("megascale.data",),  # the dataset stack
    "megascale.train.entry": ("megascale.convert", "megascale.bench"),  # Hugging Face's formats; measurements
    "megascale.ops.selftest": ("megascale.comm",),
    "megascale.checkpoint.save.saver": ("torch.distributed.checkpoint",),  # only rank 0 plans what all write
    "megascale.operate.driver.one_host": (  # before its ranks start; gRPC never
        "megascale.operate.channel.driver_server",
        "megascale.operate.channel.agent_channel",
        "megascale.operate.store.collector",
        "megascale.operate.health.checks",
        "megascale.operate.diagnose.hang.hang",
    ),
}


@pytest.fixture(scope="module")
def loaded_with(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Modules by the one of megascale that is imported, each in a process of its own, forked when torch is there."""
    code = f"""
import importlib, json, os, sys
import torch
found = {{}}
for name in {list(DOES_WITHOUT)!r}:
    reader, writer = os.pipe()
    if os.fork() == 0:
        importlib.import_module(name)
        os.write(writer, json.dumps(list(sys.modules)).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        found[name] = json.load(pipe)
json.dump(found, sys.stdout)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path_factory.mktemp("forked")
    )
    loaded: dict[str, list[str]] = json.loads(done.stdout)
    return loaded


@pytest.mark.parametrize("name", DOES_WITHOUT)
def test_what_a_module_does_without(name: str, loaded_with: dict[str, list[str]]) -> None:
    assert name in loaded_with[name]
    assert not [other for other in loaded_with[name] if other.startswith(DOES_WITHOUT[name])]


def test_a_rank_starts_without_what_its_first_steps_do_not_need(tmp_path: Path) -> None:
    tree = settings(GPT, tmp_path, train__steps=3, checkpoint__every=1000)
    code = f"""
import json, sys
from megascale.checkpoint.checkpoints import Checkpoints
from megascale.cli.main import main
found, save = [], Checkpoints.start_save
def start_save(*arguments):
    found.append(list(sys.modules))
    save(*arguments)
Checkpoints.start_save = start_save
status = main(["train", {str(write_config(tree, tmp_path / "config.toml"))!r}])
print(json.dumps([status, *found, list(sys.modules)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, at_save, at_end = json.loads(done.stdout.splitlines()[-1])
    absent = {name: [other for other in at_save if f"{other}.".startswith(f"{name}.")] for name in NOT_AT_A_START}
    assert status == 0
    assert {name: found for name, found in absent.items() if found} == {}
    assert {"torch.distributed.checkpoint", "torch.distributed.tensor", "sympy"} <= set(at_end)


def test_importing_everything_does_nothing_else(tmp_path: Path) -> None:
    absent = [name for name, language in KERNELS.items() if find_spec(language) is None]
    names = [name for name in modules() if not name.endswith("__main__") and name not in absent]
    found = after_importing(names, tmp_path)
    assert "torch" in found["packages"], "the tests above would notice it"
    assert found["output"] == [""]
    assert found["threads"] == ["MainThread"]
    assert found["signals"] == []
    assert found["world"] == ["False"]
    ours = [name for name in found["environment"] if name.startswith(("MEGASCALE", "OMP", "MASTER", "GLOO", "NCCL"))]
    assert ours == []
    assert list(tmp_path.iterdir()) == []
