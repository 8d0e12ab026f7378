"""Standard streams that are closed, or whose disk is full, and text in any locale: file names, and what is printed."""

from __future__ import annotations

import io
import locale
import os
import sys


def open_closed_streams() -> None:
    """Open the null device in place of closed standard streams: sockets and files would get their descriptors, and
    what a library prints would go there.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w"))


def discard_unwritable_output() -> bool:
    """Discard standard output if it takes no more, as on a full disk. Returns True if so."""
    try:
        print(flush=True)
    except OSError:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
        return True
    return False


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
