"""Rules of the losses beside that of the next token: distillation from a file of soft labels, and objectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from megascale.catalog.objectives import OBJECTIVES
from megascale.config.data import DataConfig
from megascale.config.exclusions import REMOVE, Exclusions, only, unsupported
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.sites import SitesConfig
from megascale.config.teacher_file import needed_labels, read_header
from megascale.config.train import BatchConfig, TrainConfig
from megascale.core.errors import DataError

NO_TEACHER = Exclusions("train.distill_teacher", only(None), tuple(
    (f"train.{name}", only(TrainConfig.model_fields[name].default), "has no effect without a teacher",
     "train.distill_teacher, or remove the key") for name in ("distill_alpha", "distill_top_k", "distill_until_step")
))  # fmt: skip

TEACHER = unsupported(
    "train.distill_teacher",
    ("parallel.vocab_pp", only(0), "the passes over a shared vocabulary have the statistics of labels alone", "0"),
    ("parallel.hybrid_dp", only(False), "soft labels are of whole samples", "false"),
    ("data.blend_policy", only(None), "the order of samples is known only as the run goes on", "no policy"),
)  # fmt: skip

WHOLE_SAMPLES = unsupported(
    "train.objectives",
    ("data.sequence_chunk_tokens", only(None), "objectives see whole sequences", REMOVE),
    ("parallel.hybrid_dp", only(False), "objectives see whole samples", "false"),
    ("train.noise_scale_every", only(0), "the noise scale of several losses is not supported", "0"),
)  # fmt: skip


def objectives(train: TrainConfig, data: DataConfig) -> Iterator[Finding]:
    """Check that an objective has one table, because metrics name the loss by its type, and its documents an end."""
    key, names = "train.objectives", [table["type"] for table in train.objectives]
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield Finding(key, f"has {twice} twice", "one table for each type")
    for name, table in zip(names, train.objectives, strict=True):
        option = OBJECTIVES[name].facts["document_end"]
        if option and data.eod != (token := table[option]):
            message = f"{name} compares documents that are split at {option} = {token}, which is not data.eod"
            yield Finding(key, message, f'data.attention_mask = "document" and data.eod = {token}')


def distillation(model: ModelConfig, train: TrainConfig) -> Iterator[Finding]:
    """Check that a teacher lists tokens of the vocabulary, each once, up to a step of the run."""
    if train.soft_tokens > model.vocab_size:
        message = f"{train.soft_tokens} tokens of a vocabulary of {model.vocab_size}"
        yield Finding("train.distill_top_k", message, f"at most {model.vocab_size}")
    if train.distill_until_step > train.steps:
        message = f"the run ends before step {train.distill_until_step}, with train.steps = {train.steps}"
        yield Finding("train.distill_until_step", message, f"at most {train.steps}, or 0 for all steps")


def teacher_file(model: ModelConfig, batch: BatchConfig, train: TrainConfig, sites: SitesConfig) -> Iterator[Finding]:
    """Check that the file of soft labels is whole, and of this vocabulary, order and length of samples."""
    key, path = "train.distill_teacher", train.teacher_file
    if path is None:
        return
    try:
        header = read_header(path)
    except DataError as error:
        yield Finding(key, error.message, error.hint)
        return
    for name, value in asdict(needed_labels(model, batch, train, sites)).items():
        found, exact = getattr(header, name), name not in ("top_k", "samples")
        if found < value or (exact and found != value):
            message = f"{path} has {name} = {found}, and this run needs {value}"
            fewer = ", or a smaller train.distill_until_step" if name == "samples" else ""
            yield Finding(key, message, f"a file written by `megascale data teacher` with this configuration{fewer}")
