"""The input files of `megascale data prepare`: paths, folders, patterns and URLs, and how each is read.

    .jsonl .ndjson .json    an object with the text on each line
    .parquet                a row with the text in a column
    any other               the whole file is a document

`.gz` or `.zst` after the first and the last is decompressed while it is read.
"""

from __future__ import annotations

import errno
import glob
import gzip
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from megascale.core.errors import DataError
from megascale.core.files import exists, is_file, is_folder, why_unreadable
from megascale.core.limits import os_error_hint

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Suffixes of files with a JSON object per line; `.json` too, as megatron-core's users name such files."""

TABLES = (".parquet",)
TEXTS = (".txt", ".text", ".md")
"""Suffixes of plain text, by which files of a folder are found; a file that is named is read whatever its suffix."""

COMPRESSED = (".gz", ".zst")
MAGIC = ("*", "?", "[")

LFS_POINTER_BYTES = 1024  # upper bound of the size of a git-lfs pointer: larger files are not opened to tell

INPUT_HINT = "give text, .jsonl or .parquet files"


@dataclass(frozen=True)
class InputFile:
    """A file of the input: path or URL, bytes, and a `version`, which differs after a change."""

    name: str
    size: int
    version: str

    @property
    def suffixes(self) -> tuple[str, str]:
        """The suffix of the content, and of the compression, or ""."""
        name = PurePosixPath(self.name.lower())
        return (PurePosixPath(name.stem).suffix, name.suffix) if name.suffix in COMPRESSED else (name.suffix, "")


def find_inputs(names: Sequence[str]) -> tuple[list[InputFile], int]:
    """The files of `names` in their order, those of a folder or pattern sorted by name; also the number of files of
    other kinds in folders.

    Raises: DataError for a name without files
    """
    known = (*JSON_LINES, *TABLES, *TEXTS)
    files: list[InputFile] = []
    ignored = 0
    for name in names:
        with explained(name):
            found, of_folder = _find_remote(name) if "://" in name else _find_local(name)
        kept = [file for file in found if not of_folder or file.suffixes[0] in known]
        if not kept:
            raise DataError(f"{name} has no file of {', '.join(known)}", hint=INPUT_HINT)
        files += kept
        ignored += len(found) - len(kept)
    return files, ignored


def _find_local(name: str) -> tuple[list[InputFile], bool]:
    """Return the files, and whether `name` is a folder's."""
    path = Path(name)
    if is_folder(path):
        files = [p for p in path.rglob("*") if is_file(p)]
        inside = sorted(str(p) for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts))
        return [_local(found) for found in inside], True
    if not exists(path) and any(character in name for character in MAGIC):
        matches = [found for found in sorted(glob.glob(name, recursive=True)) if is_file(found)]  # noqa: PTH207
        if not matches:
            raise DataError(f"{name} matches no file", hint=INPUT_HINT)
        return [_local(found) for found in matches], False
    if not is_file(path):
        raise DataError(f"{name} {'is no file' if exists(path) else 'does not exist'}", hint=INPUT_HINT)
    return [_local(name)], False


def _local(name: str) -> InputFile:
    facts = Path(name).stat()
    if facts.st_size < LFS_POINTER_BYTES and (reason := why_unreadable(name)):
        raise DataError(reason, hint=INPUT_HINT)
    return InputFile(name, facts.st_size, str(facts.st_mtime_ns))


def _find_remote(url: str) -> tuple[list[InputFile], bool]:
    """Return the files, and whether `url` is a folder's or a pattern. Raises: OSError for a URL without files"""
    from fsspec.core import url_to_fs

    from megascale.core.storage import file_version

    fs, path = url_to_fs(url)
    look = fs.glob if any(character in path for character in MAGIC) else fs.find  # of a file, the file itself
    found = look(path, detail=True)
    inside = sorted((name, facts) for name, facts in found.items() if facts["type"] == "file")
    files = [InputFile(fs.unstrip_protocol(name), facts["size"], file_version(facts)) for name, facts in inside]
    if not files:
        raise FileNotFoundError(errno.ENOENT, "there is no such file", url)
    return files, [name for name, _ in inside] != [path]


@contextmanager
def open_input(file: InputFile) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file. Yields the file, and its decompressed content, which is the file itself without compression."""
    if "://" in file.name:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(file.name)
        opened = fs.open(path, "rb")
    else:
        opened = open(file.name, "rb")  # noqa: SIM115  closed below
    with opened as raw:
        if file.suffixes[1] == ".gz":
            with gzip.GzipFile(fileobj=raw) as content:
                yield raw, content  # type: ignore[misc]
        elif file.suffixes[1] == ".zst":
            import pyarrow

            yield raw, pyarrow.CompressedInputStream(raw, "zstd")
        else:
            yield raw, raw


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Raise a DataError in place of an error of the file system, of decompression, or of a client of remote storage."""
    try:
        yield
    except DataError:
        raise
    except EOFError as error:
        raise DataError(f"{name} is cut short: {error}", hint="copy the file again") from None
    except OSError as error:
        hint = os_error_hint(error, "copy the file again" if error.errno is None else INPUT_HINT)
        raise DataError(f"{name} cannot be read: {error.strerror or error}", hint=hint) from None
    except Exception as error:  # clients of remote storage, and zlib, raise errors of any class
        raise DataError(f"{name} cannot be read: {error!r}", hint="check the file") from None
