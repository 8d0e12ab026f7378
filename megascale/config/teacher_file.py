"""The file of a teacher's soft labels: a header, and for each sample of a run a record (`data.mix.teacher`).

The first line is JSON, padded with spaces to HEADER_BYTES. A sample is found by its number in the run, which no layout
changes; the digest of its tokens in the record tells another order or other data. No numpy here: `megascale check`
answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale.core.errors import DataError
from megascale.core.files import why_unreadable

FORMAT = "megascale soft labels 1"
HEADER_BYTES = 1 << 16
DIGEST_BYTES = 8
ENTRY_BYTES = 8  # of a token: its id, i32, and its log-probability, f32
WRITE_AGAIN_HINT = "write it again with `megascale data teacher`"


@dataclass(frozen=True)
class TeacherHeader:
    """The first `samples` samples of a run, of `seq_length` labels each, with the `top_k` likeliest of `vocab_size`
    tokens. `seed`: of the order of samples; `data`: the identities of datasets by prefix; `teacher`: the checkpoint and
    its model in words.
    """

    vocab_size: int
    seq_length: int
    top_k: int
    samples: int
    seed: int
    data: Mapping[str, str]
    teacher: str

    @property
    def record_bytes(self) -> int:
        return DIGEST_BYTES + ENTRY_BYTES * self.seq_length * self.top_k

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.samples * self.record_bytes

    def encode(self) -> bytes:
        """Return the header's bytes. Raises: DataError for more datasets than fit"""
        text = json.dumps({"format": FORMAT, **asdict(self)}).encode()
        if len(text) >= HEADER_BYTES:
            raise DataError(f"{len(self.data)} datasets do not fit the header of soft labels", hint="fewer datasets")
        return text.ljust(HEADER_BYTES - 1) + b"\n"


def read_header(path: str) -> TeacherHeader:
    """Read the header of a file, and check the file's size. Raises: DataError"""
    if reason := why_unreadable(path):
        raise DataError(reason, hint="a file written by `megascale data teacher`")
    try:
        with open(path, "rb") as file:
            facts = json.loads(file.read(HEADER_BYTES))
        if facts.pop("format") != FORMAT:
            raise ValueError
        header = TeacherHeader(**facts)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", hint="check its permissions") from None
    except (ValueError, TypeError, AttributeError, KeyError):
        raise DataError(f"{path} is no file of soft labels", hint=WRITE_AGAIN_HINT) from None
    if (size := Path(path).stat().st_size) != header.file_bytes:
        raise DataError(f"{path} has {size} bytes, and its header says {header.file_bytes}", hint=WRITE_AGAIN_HINT)
    return header
