"""Preparation of a dataset: input files are read ahead, tokenized in chunks by workers, and appended in their order.

A killed preparation continues: `.NAME.progress.json` beside the dataset says how far the files on disk go, and of which
inputs and arguments. The result is the same to the byte, for any number of workers and of deaths.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from megascale.core.errors import DataError
from megascale.core.files import exists, write_text
from megascale.data.prepare.chunk_encoder import (
    EncodedChunks,
    Encoding,
    Skipped,
    count_skipped,
    encode_chunks,
    encode_in_workers,
)
from megascale.data.prepare.dataset_writer import (
    DatasetWriter,
    can_continue,
    check_output,
    explained_write,
    token_dtype,
)
from megascale.data.prepare.documents import CHUNK_BYTES, PIECE_BYTES, BadDocumentError, Chunk, read_chunks
from megascale.data.prepare.inputs import InputFile, find_inputs
from megascale.data.prepare.read_ahead import read_ahead
from megascale.data.prepare.tokenizer import Tokenizer, load_tokenizer
from megascale.data.read.indexed_dataset import DatasetInfo, TokenizerInfo

SAVE_EVERY_S = 5.0  # seconds between records of the progress, each after a flush to disk

SKIP_BAD = "--skip-bad"

FILES_AHEAD, CHUNKS_AHEAD = 4, 8  # files read at a time, and waiting chunks of each


@dataclass(frozen=True)
class PrepareRequest:
    """The arguments of `megascale data prepare`. `inputs`: paths, folders, patterns and URLs. `key`: the field or
    column of the text. `add_bos`: begin each document with the tokenizer's beginning-of-text token. `skip_bad`: skip
    what is no text.
    """

    inputs: Sequence[str]
    output: Path
    tokenizer: str
    key: str = "text"
    eod: str | None = None
    add_bos: bool = False
    workers: int = 1
    skip_bad: bool = False


@dataclass(frozen=True)
class PrepareState:
    """How far a preparation is: `chunks` of file number `file` are written, the files on disk have `tokens` of
    `documents`, `highest_token`, and `open_tokens` of a document that has not ended. `plan`: digests of inputs and
    arguments, by name.
    """

    plan: dict[str, str]
    file: int = 0
    chunks: int = 0
    tokens: int = 0
    documents: int = 0
    highest_token: int = -1
    open_tokens: int = 0
    skipped_by_reason: Skipped = field(default_factory=Skipped)


@dataclass(frozen=True)
class Prepared:
    """The result of a preparation: the dataset, the files and bytes that were read, what was skipped by reason (number,
    and place of the first), the files of other kinds in the input's folders, and the documents that an earlier,
    unfinished preparation had written.
    """

    dataset: DatasetInfo
    files: int
    bytes: int
    skipped: Skipped
    ignored_files: int
    continued_after: int


def prepare_dataset(
    request: PrepareRequest,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Write `request.output`.bin, .idx and .json. `progress`: called with the bytes of input done, and of all. `say`:
    called with a line for the user about an unfinished preparation, or an existing dataset.

    Raises: DataError, naming file and line, for input that is not text, and for unreadable or unwritable files
    """
    tokenizer = load_tokenizer(request.tokenizer, request.eod)
    files, ignored = find_inputs(request.inputs)
    local = [file.name for file in files if "://" not in file.name]
    check_output(request.output, map(Path, (*local, request.tokenizer)))
    if request.add_bos and tokenizer.bos is None:
        raise DataError(f"{tokenizer.name} does not say which token begins a text", hint="leave out --add-bos")
    bos = tokenizer.bos if request.add_bos else None
    encoding = Encoding(request.tokenizer, tokenizer.eod, bos, request.key, request.skip_bad)
    origin = TokenizerInfo(tokenizer.name, tokenizer.fingerprint, tokenizer.eod, tokenizer.eod_origin, encoding.bos)
    dtype, total = token_dtype(tokenizer.vocab_size), sum(file.size for file in files)
    begun = _begin(request.output, dtype, _plan(files, encoding, tokenizer), request.skip_bad, say)
    if exists(index := request.output.with_name(f"{request.output.name}.idx")):
        say(f"{index} and the other files of the dataset are replaced at the end")
    with DatasetWriter(request.output, dtype, (begun.tokens, begun.documents, begun.highest_token)) as writer:
        preparation = Preparation(files, encoding, writer, begun)
        try:
            preparation.run(tokenizer, request.workers, lambda done: progress(done, total))
        except BaseException as error:
            with suppress(DataError):
                preparation.save()
            if isinstance(error, BadDocumentError):
                hint = f"{error.hint}, or the same command with --skip-bad"
                raise DataError(error.message, hint=hint) from None
            raise
        if not writer.documents:
            preparation.discard()
        dataset = writer.commit(origin, tokenizer.vocab_size, progress_file(request.output))
    return Prepared(dataset, len(files), total, preparation.progress.skipped_by_reason, ignored, begun.documents)


def _plan(files: Sequence[InputFile], encoding: Encoding, tokenizer: Tokenizer) -> dict[str, str]:
    facts = {
        "inputs": [asdict(file) for file in files],
        "tokenizer": [tokenizer.fingerprint, tokenizer.vocab_size, encoding.eod, encoding.bos],
        "--key": encoding.key,
        SKIP_BAD: encoding.skip_bad,
        "sizes of chunks": [CHUNK_BYTES, PIECE_BYTES],
    }
    return {name: hashlib.sha256(json.dumps(fact).encode()).hexdigest()[:16] for name, fact in facts.items()}


def _begin(
    output: Path, dtype: type[np.generic], plan: dict[str, str], skip_bad: bool, say: Callable[[str], None]
) -> PrepareState:
    """The progress of an unfinished preparation of the same plan, or of one without `skip_bad`; otherwise none, and
    `say` why.
    """
    try:
        facts = json.loads(progress_file(output).read_text(encoding="utf-8"))
        skipped = {reason: (count, first) for reason, (count, first) in facts.pop("skipped_by_reason").items()}
        found = PrepareState(highest_token=facts.pop("highest_token"), skipped_by_reason=skipped, **facts)
    except FileNotFoundError:
        return PrepareState(plan)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        say(f"starts anew: {progress_file(output)} cannot be read: {error!r}")
        return PrepareState(plan)
    changed = [name for name in plan if found.plan.get(name) != plan[name]]
    if changed == [SKIP_BAD] and skip_bad:  # nothing has been bad so far
        found = replace(found, plan=plan)
    elif changed:
        say(f"starts anew: an unfinished preparation of {output} had other {', '.join(changed)}")
        return PrepareState(plan)
    if not can_continue(output, dtype, (found.tokens, found.documents)):
        say(f"starts anew: files of the unfinished preparation of {output} are gone or cut")
        return PrepareState(plan)
    say(f"continues after {found.documents} documents of an unfinished preparation")
    return found


@dataclass
class Preparation:
    """Appends to `writer` what `progress` lacks. The progress is replaced as a whole after every task, so that it is
    true at any interruption; tokens beyond it are cut off when the preparation continues. `ends`: file, chunks of it,
    and bytes of input, at the end of each task that is not yet written.
    """

    files: Sequence[InputFile]
    encoding: Encoding
    writer: DatasetWriter
    progress: PrepareState
    ends: deque[tuple[int, int, int]] = field(default_factory=deque)

    def run(self, tokenizer: Tokenizer, workers: int, report: Callable[[int], None]) -> None:
        """Write all chunks that remain. `report`: called with the bytes of input that are done."""
        done, saved = sum(file.size for file in self.files[: self.progress.file]), time.monotonic()
        tasks = self._tasks()
        if workers == 1:
            results = (encode_chunks(self.encoding, tokenizer, chunks) for chunks in tasks)
        else:
            results = encode_in_workers(self.encoding, workers, tasks)
        with closing(tasks), closing(results):
            for encoded in results:
                file, chunks, size = self.ends.popleft()
                self.progress = self._append(encoded, file, chunks)
                report(done := done + size)
                if time.monotonic() - saved > SAVE_EVERY_S:
                    self.save()
                    saved = time.monotonic()

    def save(self) -> None:
        """Record the progress, once its data is on disk; without any, remove the files."""
        if not self.progress.documents:
            self.discard()
            return
        self.writer.flush()
        with explained_write(self.writer.prefix):
            write_text(progress_file(self.writer.prefix), json.dumps(asdict(self.progress)))

    def discard(self) -> None:
        self.writer.discard()
        progress_file(self.writer.prefix).unlink(missing_ok=True)

    def _append(self, encoded: EncodedChunks, file: int, chunks: int) -> PrepareState:
        lengths = list(encoded.lengths)
        if encoded.continues:
            lengths[0] += self.progress.open_tokens
        open_tokens = lengths.pop() if encoded.open_end else 0
        writer, skipped = self.writer, dict(self.progress.skipped_by_reason)
        writer.append(encoded.tokens, np.array(lengths, dtype=np.int64))
        for reason, (count, first) in encoded.skipped.items():
            count_skipped(skipped, reason, count, first)
        written = writer.tokens, writer.documents, writer.highest_token
        return PrepareState(self.progress.plan, file, chunks, *written, open_tokens, skipped)

    def _tasks(self) -> Generator[list[Chunk]]:
        """Group the chunks that remain to tasks of about CHUNK_BYTES."""
        task, read, held = list[Chunk](), 0, 0
        end = 0, 0
        with closing(self._chunks()) as chunks:
            for file, number, chunk in chunks:
                task.append(chunk)
                read, held, end = read + chunk.size, held + chunk.held_bytes, (file, number + 1)
                if held >= CHUNK_BYTES:
                    self.ends.append((*end, read))
                    yield task
                    task, read, held = [], 0, 0
        if task:
            self.ends.append((*end, read))
            yield task

    def _chunks(self) -> Generator[tuple[int, int, Chunk]]:
        """Yield (file number, chunk number, chunk) for the chunks that remain."""
        first_file, first_chunk = self.progress.file, self.progress.chunks

        def read(file: int) -> Iterator[tuple[int, int, Chunk]]:
            chunks = enumerate(read_chunks(self.files[file], self.encoding.key))
            for number, chunk in islice(chunks, first_chunk if file == first_file else 0, None):
                yield file, number, chunk

        sources = (partial(read, file) for file in range(first_file, len(self.files)))
        return read_ahead(sources, FILES_AHEAD, CHUNKS_AHEAD)


def progress_file(output: Path) -> Path:
    """The record of an unfinished preparation."""
    return output.with_name(f".{output.name}.progress.json")
