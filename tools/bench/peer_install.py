"""A virtual environment for a peer whose requirements do not fit beside ours: with a torch of its own, for the CPU, or
beside the Python that runs this, whose torch it uses.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from peer_systems import ROOT

ENVIRONMENTS = ROOT / "build" / "peers"

# With its requirements torchtitan may bring another torch: they are named here, and torch's version comes from ours.
TORCHTITAN = ("torchtitan==0.3.0", "torch_checkpointing", "spmd_types==0.2.3")
BESIDE_IT = ("torch", "numpy", "torchdata", "datasets<4.8", "tokenizers", "safetensors")
FOR_ITS_IMPORTS = ("tyro", "tensorboard", "einops", "pillow")


def python_of(system: str) -> Path | None:
    """The Python that runs a system; None if it is not installed."""
    if system != "torchtitan":
        return Path(sys.executable)
    own = ENVIRONMENTS / system / "bin" / "python"
    return own if own.exists() else None


def install_torchtitan() -> None:
    """Make its environment, with the torch of constraints.txt."""
    folder = ENVIRONMENTS / "torchtitan"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *BESIDE_IT, *FOR_ITS_IMPORTS], check=True)
    subprocess.run([*pip, "--no-deps", *TORCHTITAN], check=True)


BESIDE = ROOT / "build" / "gpu-peers"

TORCHTITAN_OLD = ("torchtitan==0.2.2",)
"""For a torch before 2.13."""


def requirements(system: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is installed with its own requirements, and what without them, for they may bring another torch."""
    if system == "megatron-core":
        return ("numpy", "packaging"), ("megatron-core==0.16.1",)
    new = tuple(int(part) for part in (present("torch") or "0.0").split(".")[:2]) >= (2, 13)
    plain = ("numpy", "datasets<4.8", "tokenizers", "safetensors", "fsspec", "tomli", *FOR_ITS_IMPORTS)
    return plain, (*(TORCHTITAN if new else TORCHTITAN_OLD), "torchdata")


def beside(system: str) -> Path | None:
    """The Python of a system that was installed beside this one; None if it was not."""
    own = BESIDE / system / "bin" / "python"
    return own if (BESIDE / system / "installed").exists() else None


def install_beside(system: str) -> None:
    """Make a system's environment: a virtual one that sees all packages of this Python, torch among them, and its own
    first. Does nothing if it is there.

    Raises: OSError if pip cannot
    """
    folder = BESIDE / system
    if beside(system) is not None:
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "present.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    pins = folder / "pins.txt"
    pins.write_text("".join(f"{name}=={found}\n" for name in ("torch", "numpy") if (found := present(name))))
    plain, alone = requirements(system)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for words in (["-c", str(pins), *plain], ["--no-deps", *alone]):
        done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip failed")
    (folder / "installed").touch()


def present(name: str) -> str | None:
    """The version of a package of this Python, if it has it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
