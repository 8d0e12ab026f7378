"""The file of a teacher's soft labels: a line of JSON, and for each sample of a run a record (`data.mix.teacher`).

A sample is found by its number in the run, which no layout changes; the digest of its tokens in the record tells
another order or other data. No numpy here: `megascale check` answers at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale.config.batch_rampup import batch_sizes
from megascale.config.model import ModelConfig
from megascale.config.sites import SitesConfig
from megascale.config.train import BatchConfig, TrainConfig
from megascale.core.errors import DataError
from megascale.core.files import why_unreadable

DIGEST_BYTES = 8
ENTRY_BYTES = 8  # of a token: its id, i32, and its log-probability, f32
WRITE_AGAIN_HINT = "write it again with `megascale data teacher`"


@dataclass(frozen=True)
class TeacherHeader:
    """The first `samples` samples of a run, of `seq_length` labels each, with the `top_k` likeliest of `vocab_size`
    tokens. `seed`: of the order of samples.
    """

    vocab_size: int
    seq_length: int
    seed: int
    top_k: int
    samples: int

    @property
    def line(self) -> bytes:
        """The first line of the file."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @property
    def file_bytes(self) -> int:
        return len(self.line) + self.samples * (DIGEST_BYTES + ENTRY_BYTES * self.seq_length * self.top_k)


def needed_labels(model: ModelConfig, batch: BatchConfig, train: TrainConfig, sites: SitesConfig) -> TeacherHeader:
    """Return the header of a file with what a run needs, at all of its sites: it reads no more tokens and samples."""
    samples = batch_sizes(batch, sites.count).before_step((train.distill_until_step or train.steps) + 1)
    return TeacherHeader(model.vocab_size, model.seq_length, train.seed, train.distill_top_k, samples)


def read_header(path: str) -> TeacherHeader:
    """Read the header of a file, and check the file's size. Raises: DataError"""
    if reason := why_unreadable(path):
        raise DataError(reason, hint="a file written by `megascale data teacher`")
    try:
        with open(path, "rb") as file:
            header = TeacherHeader(**json.loads(file.readline(1 << 16)))
    except (ValueError, TypeError):
        raise DataError(f"{path} is no file of soft labels", hint=WRITE_AGAIN_HINT) from None
    if (size := Path(path).stat().st_size) != header.file_bytes:
        raise DataError(f"{path} has {size} bytes, and its header says {header.file_bytes}", hint=WRITE_AGAIN_HINT)
    return header
