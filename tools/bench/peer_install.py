"""A virtual environment for a peer whose requirements do not fit beside ours."""

from __future__ import annotations

import subprocess
import sys
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
