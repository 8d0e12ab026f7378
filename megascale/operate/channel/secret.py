"""The job's secret: what its processes know, and no other user of their hosts.

`job_secret` finds it, in this order: a descriptor inherited from megascale's launcher, the environment variable
MEGASCALE_JOB_SECRET, a file in `output_dir`. It never stands on a command line.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from megascale.core.env_numbers import whole_number
from megascale.core.errors import ConfigError, Problem

SECRET_VARIABLE = "MEGASCALE_JOB_SECRET"  # environment variable: the secret as text, the same on every host

DESCRIPTOR_VARIABLE = "MEGASCALE_JOB_SECRET_FD"
"""Environment variable of a rank: the descriptor from which the secret is read, set by megascale's launcher."""

SECRET_FILE = ".megascale-secret-{user}"
"""File beside the runs, of mode 600, one for each user: written by the first rank of a job without another secret. Not
in the run's folder, because hosts that disagree about the run's name must meet to say so.
"""

MIN_CHARACTERS = 32  # fewest characters of MEGASCALE_JOB_SECRET
WRITE_S = 5.0  # seconds that a rank waits for another rank to finish the file

MAKE_HINT = f"export {SECRET_VARIABLE}=$(openssl rand -hex 32), the same on every host"


def new_secret() -> str:
    """Return a random secret: 64 hexadecimal digits."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def secret_descriptor(secret: str) -> Iterator[int]:
    """Open a descriptor from which a child process reads `secret`. The memory has no name in any file system."""
    descriptor = os.memfd_create("megascale-secret")
    try:
        os.write(descriptor, secret.encode())
        yield descriptor
    finally:
        os.close(descriptor)


def inheritable_secret(env: Mapping[str, str] = os.environ) -> int:
    """Return a descriptor from which child processes read the secret of this process: the one that it inherited, or one
    with the text of MEGASCALE_JOB_SECRET.

    Raises: ConfigError without a secret
    """
    if DESCRIPTOR_VARIABLE in env:
        _read_descriptor(env)
        return int(env[DESCRIPTOR_VARIABLE])
    if SECRET_VARIABLE not in env:
        raise ConfigError([Problem("environment", SECRET_VARIABLE, "not set", MAKE_HINT)])
    descriptor = os.memfd_create("megascale-secret")
    os.write(descriptor, os.fsencode(env[SECRET_VARIABLE]))
    return descriptor


def job_secret(folder: Path | None, env: Mapping[str, str] = os.environ) -> bytes:
    """Return the key, 32 bytes, that follows from the job's secret. `folder`: the folder of the user's runs.

    Raises: ConfigError if the secret is too short, if other users could read or replace its file, or without a secret.
    """
    if DESCRIPTOR_VARIABLE in env:
        text = _read_descriptor(env)
    elif SECRET_VARIABLE in env:
        text = os.fsencode(env[SECRET_VARIABLE])
        if len(text) < MIN_CHARACTERS:
            message = f"{len(text)} characters; {MIN_CHARACTERS} or more are needed"
            raise ConfigError([Problem("environment", SECRET_VARIABLE, message, MAKE_HINT)])
    elif folder is not None:
        text = _file_secret(secret_file(folder))
    else:
        raise ConfigError([Problem("environment", SECRET_VARIABLE, "not set", MAKE_HINT)])
    return hashlib.sha256(text).digest()


def sites_secret() -> bytes:
    """Return the key of the secret in the environment, which jobs at several sites share. Raises: ConfigError"""
    return job_secret(None, {name: value for name, value in os.environ.items() if name == SECRET_VARIABLE})


def _read_descriptor(env: Mapping[str, str]) -> bytes:
    hint = "unset the variable: megascale train sets it for its ranks"
    descriptor = whole_number(env, DESCRIPTOR_VARIABLE, hint=hint)
    try:
        text, message = os.pread(descriptor, 1 << 10, 0), f"{descriptor} has no secret"
    except (OSError, OverflowError) as error:
        text, message = b"", f"{descriptor} cannot be read: {error}"
    if len(text) < MIN_CHARACTERS:
        raise ConfigError([Problem("environment", DESCRIPTOR_VARIABLE, message, hint)])
    return text


def secret_file(folder: Path) -> Path:
    """Return the file of this user's secret for jobs in `folder`."""
    return folder / SECRET_FILE.format(user=os.geteuid())


def _file_secret(path: Path) -> bytes:
    """Read the secret in `path`; write one first if there is no such file."""
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                os.fchmod(descriptor, 0o600)  # whatever the umask
                file.write(new_secret())
        return _read_private_file(path)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None


def _read_private_file(path: Path) -> bytes:
    deadline = time.monotonic() + WRITE_S
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb"):
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise _unusable(path, "not a regular file")
        if facts.st_uid != os.geteuid():
            raise _unusable(path, f"it belongs to user {facts.st_uid}, not to user {os.geteuid()}")
        if facts.st_mode & 0o077:
            raise _unusable(path, f"its mode {stat.S_IMODE(facts.st_mode):o} lets other users read or write it")
        while len(text := os.pread(descriptor, 1 << 10, 0)) < MIN_CHARACTERS:  # another rank is writing it
            if time.monotonic() > deadline:
                raise _unusable(path, f"{len(text)} bytes are no secret")
            time.sleep(0.01)
    return text


def _unusable(path: Path, message: str) -> ConfigError:
    hint = f"remove the file, or {MAKE_HINT}"
    return ConfigError([Problem(str(path), "", f"the job's secret cannot be used: {message}", hint)])
