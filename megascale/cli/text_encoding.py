"""Text between this process and the system in any locale: names of files, and what the commands print."""

from __future__ import annotations

import io
import locale
import os
import sys


def name_files_in_utf8() -> None:
    """Start this process again in Python's UTF-8 mode, if the locale has another encoding. TensorBoard and tokenizers
    take names of files as UTF-8, so Python must not encode them otherwise. Output keeps the encoding of the locale.
    """
    if sys.getfilesystemencoding() == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"  # for ranks and workers; this process gets -X, as it may run without variables (-E)
    os.environ.setdefault("PYTHONIOENCODING", locale.getencoding())
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def escape_output() -> None:
    """Print characters that the output's encoding lacks as escapes, such as \\u65e5, in place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
