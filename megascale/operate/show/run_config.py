"""The configuration in a run's folder."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import ValidationError

from megascale.config.run import RunConfig
from megascale.config.section import ELSEWHERE
from megascale.core.errors import Exit, MegascaleError

CONFIG_FILE = "config.toml"


class RunFolderError(MegascaleError):
    """A folder that is not a run's, or a file in it that cannot be read."""

    exit_status = Exit.CONFIG


def read_run_config(folder: Path) -> RunConfig | None:
    """Return the resolved configuration in a run's folder; None before its first step. The files that it names need not
    be there, nor the plug-ins be installed. Raises: OSError; RunFolderError naming the file and the key
    """
    path = folder / CONFIG_FILE
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        return RunConfig.model_validate(tree, context=ELSEWHERE).resolve(None)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        detail = error.errors()[0]
        reason = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
    except ValueError as error:
        reason = str(error).splitlines()[0]
    hint = "look at the run with the version of megascale that wrote it, or give another folder"
    raise RunFolderError(f"{path}: not a run's configuration: {reason}", hint=hint)
