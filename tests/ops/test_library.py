"""Optional libraries are found by what they are, not by their name alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascale.catalog.backends import BACKENDS
from megascale.ops.library import APEX, LIBRARIES, Library
from megascale.ops.select import refusal
from tests.ops.settings import GPU, setting


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package `name` of one module, with what it does when it is imported."""

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


def test_one_that_is_not_there() -> None:
    assert Library("no_such_kernels", "no_such_kernels").absence() == "no_such_kernels is not installed"


def test_one_that_is_there(install) -> None:
    install("kernels_a", "1.5", "")
    assert Library("kernels_a", "kernels_a", versions=">=1,<2").absence() is None


def test_one_that_is_installed_from_its_sources(install) -> None:
    install("kernels_f", "1.5", "", editable=True)
    assert Library("kernels_f", "kernels_f").absence() is None


def test_another_project_of_that_name(install) -> None:
    install("kernels_g", "9.9", "", module="other")
    assert Library("kernels_g", "kernels_g").version is None


def test_a_version_that_nobody_has_read(install) -> None:
    install("kernels_b", "2.0.dev1", "")
    library = Library("kernels_b", "kernels_b", versions=">=1,<2")
    assert library.version == "2.0.dev1"
    install("kernels_c", "2.1", "")
    assert Library("kernels_c", "kernels_c", versions=">=1,<2").absence() == "kernels_c 2.1 is not one of >=1,<2"


def test_one_that_was_built_for_another_torch(install) -> None:
    install("kernels_d", "1.0", "raise OSError('undefined symbol: _ZN5torch\\nand more')")
    library = Library("kernels_d", "kernels_d", source="built by hand")
    assert library.absence() == "kernels_d 1.0: undefined symbol: _ZN5torch (built by hand)"


def test_one_without_its_kernels(install) -> None:
    install("kernels_e", "1.0", "")
    missing = Library("kernels_e", "kernels_e", kernels=("no_such_cuda", "kernels_e.no_such_cuda"))
    assert missing.absence() == "kernels_e 1.0: No module named 'no_such_cuda'"
    assert Library("kernels_e", "kernels_e", kernels=("no_such_cuda", "json")).absence() is None


def test_the_apex_of_pypi_is_none(install) -> None:
    install("apex", "0.9.8.dev0", "import no_pyramid_here")
    assert APEX.version is None
    assert str(APEX.absence()).startswith("apex is not installed (NVIDIA's, built from its sources")


def test_the_apex_of_nvidia_is_one(install) -> None:
    install("apex", "0.1", "", module="apex/normalization/fused_layer_norm")
    assert APEX.version == "0.1"


KERNELS = [
    (operation, name)
    for operation in ("norm", "activation")
    for name in BACKENDS[operation].names()
    if name in ("te", "liger", "apex")
]


@pytest.mark.parametrize(("operation", "name"), KERNELS)
def test_kernels_of_libraries_refuse_what_they_cannot(operation: str, name: str) -> None:
    assert refusal(operation, name, setting()) == "needs a GPU"
    assert refusal(operation, name, setting(torch.float64)) == "has no float64"
    assert refusal(operation, name, setting(activation="gelu")) == (
        "has no gelu" if operation == "activation" else "needs a GPU"
    )


@pytest.mark.parametrize(("operation", "name"), KERNELS)
def test_on_a_gpu_the_library_is_asked(operation: str, name: str) -> None:
    libraries = {library.package.split("_")[0]: library for library in LIBRARIES} | {"te": LIBRARIES[0]}
    assert refusal(operation, name, setting(device=GPU)) == libraries[name].absence()
