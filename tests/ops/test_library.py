"""Detection of optional libraries, beyond their package names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascale.catalog.backends import BACKENDS
from megascale.ops.library import APEX, LIBRARIES, Library
from megascale.ops.select import unsupported_reason
from tests.ops.settings import GPU, setting


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that installs a package `name` of one module with the given code."""

    def put(name: str, version: str, code: str, module: str = "", editable: bool = False) -> None:
        file = tmp_path / (module or name) / "__init__.py"
        file.parent.mkdir(parents=True)
        file.write_text(code)
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        listed = f"__editable___{name}_finder.py" if editable else str(file.relative_to(tmp_path))
        (info / "RECORD").write_text(f"{listed},,\n{info.name}/METADATA,,\n")

    monkeypatch.syspath_prepend(tmp_path)
    return put


def test_a_missing_package() -> None:
    assert Library("no_such_kernels", "no_such_kernels").missing_reason() == "no_such_kernels is not installed"


def test_an_installed_package(install) -> None:
    install("kernels_a", "1.5", "")
    assert Library("kernels_a", "kernels_a", versions=">=1,<2").missing_reason() is None


def test_an_editable_installation(install) -> None:
    install("kernels_f", "1.5", "", editable=True)
    assert Library("kernels_f", "kernels_f").missing_reason() is None


def test_another_project_with_the_package_name(install) -> None:
    install("kernels_g", "9.9", "", module="other")
    assert Library("kernels_g", "kernels_g").version is None


def test_an_unsupported_version(install) -> None:
    install("kernels_b", "2.0.dev1", "")
    library = Library("kernels_b", "kernels_b", versions=">=1,<2")
    assert library.version == "2.0.dev1"
    install("kernels_c", "2.1", "")
    assert Library("kernels_c", "kernels_c", versions=">=1,<2").missing_reason() == "kernels_c 2.1 is not one of >=1,<2"


def test_a_package_built_for_another_torch(install) -> None:
    install("kernels_d", "1.0", "raise OSError('undefined symbol: _ZN5torch\\nand more')")
    library = Library("kernels_d", "kernels_d", source="built by hand")
    assert library.missing_reason() == "kernels_d 1.0: undefined symbol: _ZN5torch (built by hand)"


def test_a_package_without_kernels(install) -> None:
    install("kernels_e", "1.0", "")
    missing = Library("kernels_e", "kernels_e", kernels=("no_such_cuda", "kernels_e.no_such_cuda"))
    assert missing.missing_reason() == "kernels_e 1.0: No module named 'no_such_cuda'"
    assert Library("kernels_e", "kernels_e", kernels=("no_such_cuda", "json")).missing_reason() is None


def test_pypis_apex_does_not_count(install) -> None:
    install("apex", "0.9.8.dev0", "import no_pyramid_here")
    assert APEX.version is None
    assert str(APEX.missing_reason()).startswith("apex is not installed (NVIDIA's, built from its sources")


def test_nvidias_apex_counts(install) -> None:
    install("apex", "0.1", "", module="apex/normalization/fused_layer_norm")
    assert APEX.version == "0.1"


KERNELS = [
    (operation, name)
    for operation in ("norm", "activation")
    for name in BACKENDS[operation].names()
    if name in ("te", "liger", "apex")
]


@pytest.mark.parametrize(("operation", "name"), KERNELS)
def test_reasons_of_unsupported_kernels(operation: str, name: str) -> None:
    assert unsupported_reason(operation, name, setting()) == "needs a GPU"
    assert unsupported_reason(operation, name, setting(torch.float64)) == "has no float64"
    assert unsupported_reason(operation, name, setting(activation="gelu")) == (
        "has no gelu" if operation == "activation" else "needs a GPU"
    )


@pytest.mark.parametrize(("operation", "name"), KERNELS)
def test_on_a_gpu_the_reason_is_the_librarys(operation: str, name: str) -> None:
    libraries = {library.package.split("_")[0]: library for library in LIBRARIES} | {"te": LIBRARIES[0]}
    assert unsupported_reason(operation, name, setting(device=GPU)) == libraries[name].missing_reason()
