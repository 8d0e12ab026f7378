"""The wheel, the sdist and the images: each holds the files that it needs, and the version is that of the changelog."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import megascale

ROOT = Path(__file__).parents[1]
SOURCE = (
    ".dockerignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "configs",
    "constraints.txt", "docs", "launch", "megascale", "pyproject.toml", "setup.py", "tests", "tools",
)  # fmt: skip
CONTEXT = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
IMAGES = ["Dockerfile", "Dockerfile.cpu"]
"""Names of the repository that are in the sdist, and those that are in the context of an image."""


def source_files() -> set[str]:
    """The files that git tracks below `SOURCE`, or those of an unpacked sdist."""
    if (ROOT / ".git").exists():
        listed = ["git", "ls-files", *SOURCE]
        return set(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())
    files = [path for name in SOURCE for path in [ROOT / name, *(ROOT / name).rglob("*")] if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def package_files() -> set[str]:
    """The package's files, with those of its folder `configs`, a link in a checkout."""
    configs = {f"megascale/{name}" for name in source_files() if re.fullmatch(r"configs/.*\.toml", name)}
    return {name for name in source_files() if name.startswith("megascale/")} - {"megascale/configs"} | configs


def copy(names: tuple[str, ...] | list[str], folder: Path) -> Path:
    """Copy files and folders of the repository into a new folder."""
    folder.mkdir()
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def build(kind: str, source: Path) -> Path:
    """Build a `wheel` or an `sdist` of a folder with the installed setuptools."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = (source / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", copy(SOURCE, folder / "source"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"megascale-{megascale.__version__}"


def test_the_sdist_holds_sources_tests_tools_and_pages(sdist: Path) -> None:
    found = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    made = {name for name in found if name.startswith("megascale.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert found - made == (source_files() - {"megascale/configs"}) | package_files()


@pytest.mark.parametrize("origin", ["sdist", "context of an image"])
def test_the_wheel_holds_the_package_and_nothing_else(origin: str, sdist: Path, tmp_path: Path) -> None:
    wheel = build("wheel", sdist if origin == "sdist" else copy(CONTEXT, tmp_path / "context"))
    assert wheel.name == f"megascale-{megascale.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == package_files()
    assert f"megascale-{megascale.__version__}.dist-info/licenses/LICENSE" in names


def test_the_version_is_the_newest_of_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d\S*)", text, re.MULTILINE)[0] == megascale.__version__


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_megascale_as_a_user_and_gets_its_signals(name: str) -> None:
    text = (ROOT / "launch" / name).read_text().replace("\\\n", "")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    last = dict(lines)  # type: ignore[arg-type]
    assert int(last["USER"]) >= 1000, "a number, which Kubernetes compares with runAsNonRoot"
    assert f"--uid {last['USER']} " in text
    assert [keyword for keyword, _ in lines].index("USER") > max(n for n, line in enumerate(lines) if line[0] == "RUN")
    assert json.loads(last["ENTRYPOINT"]) == ["tini", "--", "megascale"], "no shell that would keep signals"
    for install in re.findall(r"pip install (.*)", text):
        assert "--no-cache-dir" in install and " -c /opt/megascale/" in install
