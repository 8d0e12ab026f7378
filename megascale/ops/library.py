"""Optional libraries: whether one is there, in a version that our calls were written for, and working."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

from packaging.specifiers import SpecifierSet

from megascale.ops.select import Setting

SOURCES = ".py", ".so"
"""Ends of files that say which modules a package has. One that is installed from where its sources are has none."""


@dataclass(frozen=True)
class Library:
    """`package`: its name where packages are installed from. `module`: what of it is called. `kernels`: where its
    compiled code may be, if importing `module` does not show that it is there. `versions`: those whose signatures were
    read, as in PEP 440; "" for all. `source`: where it comes from, if not from the registry.
    """

    package: str
    module: str
    kernels: tuple[str, ...] = ()
    versions: str = ""
    source: str = ""

    @property
    def version(self) -> str | None:
        """The version that is installed, None if none is, or only another project's package of that name."""
        try:
            found = distribution(self.package)
        except PackageNotFoundError:
            return None
        files = [
            name for name in map(str, found.files or []) if name.endswith(SOURCES) and not name.startswith("__editable")
        ]
        place = self.module.replace(".", "/")
        ours = not files or any(name.startswith((f"{place}/", f"{place}.")) for name in files)
        return found.version if ours else None

    def refusal(self, setting: Setting) -> str | None:
        """Why its kernels cannot serve on a device; None if they can."""
        return "needs a GPU" if setting.device.is_cpu else self.absence()

    def absence(self) -> str | None:
        """Why it cannot be called; None if it can. Imports it where its version is right."""
        found = self.version
        source = f" ({self.source})" if self.source else ""
        if found is None:
            return f"{self.package} is not installed{source}"
        if found not in SpecifierSet(self.versions, prereleases=True):
            return f"{self.package} {found} is not one of {self.versions}"
        errors = [error_of_import(module) for module in self.kernels]
        error = error_of_import(self.module) or (errors[0] if errors and all(errors) else "")
        return f"{self.package} {found}: {error}{source}" if error else None


@cache
def error_of_import(module: str) -> str:
    """What an import raises, in a line; "" if nothing. A library built for another torch may raise anything."""
    try:
        importlib.import_module(module)
    except Exception as error:
        lines = str(error).splitlines()
        return lines[0][:160] if lines else type(error).__name__
    return ""


TE = Library("transformer_engine", "transformer_engine.pytorch", versions=">=2.1,<2.21")
LIGER = Library("liger_kernel", "liger_kernel.ops", versions=">=0.8.4,<0.9")  # before, LayerNorm's statistics are bf16
APEX = Library(
    "apex",
    "apex.normalization.fused_layer_norm",
    kernels=("fused_layer_norm_cuda", "apex._extensions.fused_layer_norm_cuda"),  # the second since 2026
    source="NVIDIA's, built from its sources with --cuda_ext; PyPI's apex is another project",
)
TRITON = Library("triton", "triton")
FLASH = Library("flash_attn", "flash_attn", versions=">=2.4.1,<3")  # before, its backward has no fixed order
FLASH3 = Library("flash_attn_3", "flash_attn_interface")

LIBRARIES = (TE, LIGER, APEX, FLASH, FLASH3, TRITON)
