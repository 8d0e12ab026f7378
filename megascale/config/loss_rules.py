"""Rules of the losses beside that of the next token: distillation from a file of soft labels, and objectives."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.catalog import objectives as catalog
from megascale.config.batch_rampup import teacher_samples
from megascale.config.data import DataConfig
from megascale.config.exclusions import REMOVE, Exclusions, only, unsupported
from megascale.config.finding import Finding
from megascale.config.model import ModelConfig
from megascale.config.sites import SitesConfig
from megascale.config.teacher_file import read_header
from megascale.config.train import MOCK_TEACHER, BatchConfig, TrainConfig
from megascale.core.errors import DataError

TEACHER_KEYS = ("distill_alpha", "distill_temperature", "distill_top_k", "distill_until_step")

NO_TEACHER = Exclusions("train.distill_teacher", only(None), tuple(
    (f"train.{name}", only(TrainConfig.model_fields[name].default), "has no effect without a teacher",
     "train.distill_teacher, or remove the key") for name in TEACHER_KEYS
))  # fmt: skip

TEACHER = unsupported(
    "train.distill_teacher",
    ("parallel.vocab_pp", only(0), "the passes over a shared vocabulary have the statistics of labels alone", "0"),
    ("parallel.hybrid_dp", only(False), "soft labels are of whole samples", "false"),
    ("data.blend_policy", only(None), "the order of samples is known only as the run goes on", "no policy"),
)  # fmt: skip

OBJECTIVES = unsupported(
    "train.objectives",
    ("data.sequence_chunk_tokens", only(None), "objectives see whole sequences", REMOVE),
    ("parallel.hybrid_dp", only(False), "objectives see whole samples", "false"),
    ("train.noise_scale_every", only(0), "the noise scale of several losses is not supported", "0"),
)  # fmt: skip


def objectives(train: TrainConfig, data: DataConfig) -> Iterator[Finding]:
    """Check that an objective has one table, because metrics name the loss by its type, and one of documents a mask."""
    types = [table["type"] for table in train.objectives]
    if twice := next((name for name in types if types.count(name) > 1), None):
        yield Finding("train.objectives", f"has {twice} twice", "one table for each type")
    of_documents = [name for name in types if catalog.OBJECTIVES[name].facts["documents"]]
    if of_documents and data.attention_mask != "document":
        message = f"{of_documents[0]} compares documents, and a sample without their mask is one"
        yield Finding("train.objectives", message, 'data.attention_mask = "document"')


def distillation(model: ModelConfig, train: TrainConfig) -> Iterator[Finding]:
    """Check that a teacher lists tokens of the vocabulary, each once, up to a step of the run."""
    if train.distill_teacher and train.distill_top_k > model.vocab_size:
        message = f"{train.distill_top_k} tokens of a vocabulary of {model.vocab_size}"
        yield Finding("train.distill_top_k", message, f"at most {model.vocab_size}")


def teacher_file(model: ModelConfig, batch: BatchConfig, train: TrainConfig, sites: SitesConfig) -> Iterator[Finding]:
    """Check that the file of soft labels is whole, and of this vocabulary, order and length of samples."""
    key, path = "train.distill_teacher", train.distill_teacher
    if path in (None, MOCK_TEACHER):
        return
    try:
        header = read_header(path)
    except DataError as error:
        yield Finding(key, error.message, error.hint)
        return
    own = {"vocab_size": model.vocab_size, "seq_length": model.seq_length, "seed": train.seed}
    for name, value in own.items():
        if (found := getattr(header, name)) != value:
            section = "train" if name == "seed" else "model"
            message = f"{path} is for {section}.{name} = {found}, and this run has {value}"
            yield Finding(key, message, "a file written by `megascale data teacher` with this configuration")
    if header.top_k < train.distill_top_k:
        message = f"{path} lists {header.top_k} tokens for a label"
        yield Finding("train.distill_top_k", message, f"at most {header.top_k}")
    if header.samples < (needed := teacher_samples(batch, train, sites.count)):
        message = f"{path} has {header.samples} samples, and the steps with a teacher read {needed}"
        yield Finding(key, message, f"a file of {needed} samples, or a smaller train.distill_until_step")
