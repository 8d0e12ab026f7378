"""Optional kernel libraries: presence, supported versions, and import errors."""

from __future__ import annotations

import importlib
import os
import shutil
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

from packaging.specifiers import SpecifierSet

from megascale.device import Device
from megascale.ops.select import OpContext

SOURCES = ".py", ".so"  # suffixes of files that reveal a package's modules. An editable installation lists none


@dataclass(frozen=True)
class Library:
    """An optional library: distribution name `package`, and the `module` to call.

    `kernels`: alternative modules of compiled code, if importing `module` does not prove their presence. `versions`: a
    PEP 440 range of versions with known signatures, "" for all. `source`: origin, if not PyPI.
    """

    package: str
    module: str
    kernels: tuple[str, ...] = ()
    versions: str = ""
    source: str = ""

    @property
    def version(self) -> str | None:
        """Return the installed version; None if absent, or if another project uses the package name."""
        try:
            installed = distribution(self.package)
        except PackageNotFoundError:
            return None
        files = [
            name
            for name in map(str, installed.files or [])
            if name.endswith(SOURCES) and not name.startswith("__editable")
        ]
        path = self.module.replace(".", "/")
        ours = not files or any(name.startswith((f"{path}/", f"{path}.")) for name in files)
        return installed.version if ours else None

    def unsupported_reason(self, context: OpContext) -> str | None:
        """Say why the kernels cannot run on a device; None if they can."""
        return "needs a GPU" if context.device.is_cpu else self.missing_reason()

    def missing_reason(self) -> str | None:
        """Say why the library cannot be called; None if usable. Imports a supported version."""
        version = self.version
        source = f" ({self.source})" if self.source else ""
        if version is None:
            return f"{self.package} is not installed{source}"
        if version not in SpecifierSet(self.versions, prereleases=True):
            return f"{self.package} {version} is not one of {self.versions}"
        errors = [error_of_import(module) for module in self.kernels]
        error = error_of_import(self.module) or (errors[0] if errors and all(errors) else "")
        return f"{self.package} {version}: {error}{source}" if error else None


@cache
def error_of_import(module: str) -> str:
    """Return the first line of an import's error, "" if none. A library built for another torch may raise anything."""
    try:
        importlib.import_module(module)
    except Exception as error:
        lines = str(error).splitlines()
        return lines[0][:160] if lines else type(error).__name__
    return ""


TE = Library("transformer_engine", "transformer_engine.pytorch", versions=">=2.1,<2.21")
LIGER = Library("liger_kernel", "liger_kernel.ops", versions=">=0.8.4,<0.9")  # earlier LayerNorm statistics are bf16
APEX = Library(
    "apex",
    "apex.normalization.fused_layer_norm",
    kernels=("fused_layer_norm_cuda", "apex._extensions.fused_layer_norm_cuda"),  # the latter since 2026
    source="NVIDIA's, built from its sources with --cuda_ext; PyPI's apex is another project",
)
TRITON = Library("triton", "triton")
FLASH = Library("flash_attn", "flash_attn", versions=">=2.4.1,<3")  # earlier backwards are not deterministic
FLASH3 = Library("flash_attn_3", "flash_attn_interface")
FLASH4 = Library("flash_attn_4", "flash_attn.cute.interface")

LIBRARIES = (TE, LIGER, APEX, FLASH, FLASH3, FLASH4, TRITON)


def triton_unsupported_reason(device: Device) -> str | None:
    """Say why Triton's kernels cannot run on a device; None if they can. Their launchers are compiled from C."""
    if device.is_cpu:
        return "needs a GPU"
    if reason := TRITON.missing_reason():
        return reason
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    return None if any(map(shutil.which, names)) else f"no C compiler: there is no {' and no '.join(names)}"
