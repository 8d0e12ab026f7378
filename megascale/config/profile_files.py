"""Files of profiles: TOML files in a folder of `configs`, of the user, or of this machine, found by name."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from megascale.config.section_file import SectionT, read_section
from megascale.core.errors import ConfigError, Problem
from megascale.core.files import absolute_path, is_file, is_folder
from megascale.core.registry import closest_name

THIS_MACHINE = "this"
"""Name of this machine's hardware profile, written by `megascale bench profile`."""


def load_profile(name: str, folder: str, option: str, profile: type[SectionT]) -> SectionT:
    """Read a profile: a name in a `folder` of `configs`, a file, or `this`. `option`: of the command line, for errors.

    Raises: ConfigError for an unknown name and for mistakes in the file.
    """
    path = path_of(folder, name)
    if is_file(path) or name.endswith(".toml"):
        return read_section(str(path), profile, name=path.stem)
    if (folder, name) == ("hardware", THIS_MACHINE):
        hint = "`megascale bench profile` measures it"
        raise ConfigError([Problem(str(path), "", "this machine has not been measured", hint)])
    known, close = profile_names(folder), closest_name(name, profile_names(folder))
    alike = [known_name for known_name in known if known_name.startswith(name)] or ([close] if close else known)
    hint = f"did you mean '{alike[0]}'?" if len(alike) == 1 else f"one of {', '.join(alike)}, or a file of your own"
    raise ConfigError([Problem("command line", option, f"there is no profile '{name}'", hint)])


def profile_names(folder: str) -> list[str]:
    """List the profiles in a folder of `configs`."""
    return sorted(path.stem for path in (_configs() / folder).glob("*.toml"))


def path_of(folder: str, name: str) -> Path:
    """Return the path of a profile; `this` machine's is in the user's configuration folder."""
    if (folder, name) == ("hardware", THIS_MACHINE):
        home = os.environ.get("XDG_CONFIG_HOME") or absolute_path("~/.config")
        return Path(home) / "megascale" / "hardware" / f"{THIS_MACHINE}.toml"
    return Path(name) if name.endswith(".toml") else _configs() / folder / f"{name}.toml"


def _configs() -> Path:
    """Return the folder of profiles, in the repository or the installation."""
    repository = Path(__file__).parents[2] / "configs"
    return repository if is_folder(repository) else Path(sysconfig.get_path("data")) / "share/megascale/configs"
