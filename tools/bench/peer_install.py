"""Virtual environments for peers with conflicting requirements: with a separate CPU build of torch, or on top of this
Python's packages and torch.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from peer_systems import ROOT

ENVIRONMENTS = ROOT / "build" / "peers"

# torchtitan's own requirements may replace torch: they are listed here, and torch is pinned
TORCHTITAN = ("torchtitan==0.3.0", "torch_checkpointing", "spmd_types==0.2.3")
REQUIREMENTS = ("torch", "numpy", "torchdata", "datasets<4.8", "tokenizers", "safetensors")
IMPORTED_PACKAGES = ("tyro", "tensorboard", "einops", "pillow")


def python_of(system: str) -> Path | None:
    """Find the Python of a system; None if the system is not installed."""
    if system != "torchtitan":
        return Path(sys.executable)
    python = ENVIRONMENTS / system / "bin" / "python"
    return python if python.exists() else None


def install_torchtitan() -> None:
    """Make torchtitan's environment, with torch and numpy of constraints.txt: its fsspec is too new for `datasets`."""
    folder = ENVIRONMENTS / "torchtitan"
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in constraints if line.startswith(("torch==", "numpy=="))]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *pinned, *REQUIREMENTS, *IMPORTED_PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", *TORCHTITAN], check=True)


BESIDE = ROOT / "build" / "gpu-peers"

TORCHTITAN_OLD = ("torchtitan==0.2.2",)
"""The version for a torch before 2.13."""


def requirements(system: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the packages to install with dependencies, and without (a dependency might replace torch)."""
    if system == "megatron-core":
        return ("numpy", "packaging"), ("megatron-core==0.16.1",)
    new = tuple(int(part) for part in (present("torch") or "0.0").split(".")[:2]) >= (2, 13)
    plain = ("numpy", "datasets<4.8", "tokenizers", "safetensors", "fsspec", "tomli", *IMPORTED_PACKAGES)
    return plain, (*(TORCHTITAN if new else TORCHTITAN_OLD), "torchdata")


def beside(system: str) -> Path | None:
    """Find the Python of a system installed on top of this one; None if not installed."""
    python = BESIDE / system / "bin" / "python"
    return python if (BESIDE / system / "installed").exists() else None


def install_beside(system: str) -> None:
    """Make a system's virtual environment on top of this Python's packages, torch included. No-op if installed already.

    Raises: OSError if pip fails
    """
    folder = BESIDE / system
    if beside(system) is not None:
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "present.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    pins = folder / "pins.txt"
    pins.write_text("".join(f"{name}=={pinned}\n" for name in ("torch", "numpy") if (pinned := present(name))))
    plain, alone = requirements(system)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for words in (["-c", str(pins), *plain], ["--no-deps", *alone]):
        completed = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
        if completed.returncode:
            raise OSError(completed.stderr.strip().splitlines()[-1] if completed.stderr.strip() else "pip failed")
    (folder / "installed").touch()


def present(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
