"""The configuration in a run's folder, and its model in words."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import ValidationError

from megascale.config.model import ModelConfig
from megascale.config.renamed import with_present_names
from megascale.config.run import RunConfig
from megascale.config.section import ELSEWHERE
from megascale.core.named_run import CONFIG_FILE, RunFolderError
from megascale.core.registry import CardError
from megascale.layout.parameters import describe_parameters


def read_run_config(folder: Path) -> RunConfig | None:
    """Return the resolved configuration in a run's folder; None before its first step. The files that it names need not
    be there, nor the plug-ins be installed. Raises: OSError; RunFolderError naming the file and the key
    """
    path = folder / CONFIG_FILE
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        return RunConfig.model_validate(with_present_names(tree), context=ELSEWHERE).resolve(None)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        detail = error.errors()[0]
        reason = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
    except ValueError as error:
        reason = str(error).splitlines()[0]
    hint = "look at the run with the version of megascale that wrote it, or give another folder"
    raise RunFolderError(f"{path}: not a run's configuration: {reason}", hint=hint)


def model_words(model: ModelConfig, precision: str) -> str:
    """Return a model in a few words."""
    try:
        size = describe_parameters(model)
    except CardError as error:
        size = f"an unknown number of parameters ({error.message})"
    return f"{size} in {precision}, {model.num_layers} layers of {model.hidden_size}, sequences of {model.seq_length}"
