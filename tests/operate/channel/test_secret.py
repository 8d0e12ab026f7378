"""The job's secret: where it is found, and files that are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megascale.core.errors import ConfigError
from megascale.operate.channel.secret import (
    DESCRIPTOR_VARIABLE,
    SECRET_VARIABLE,
    job_secret,
    new_secret,
    secret_descriptor,
    secret_file,
)


def test_the_launchers_descriptor_comes_before_the_variable_and_the_variable_before_the_file(tmp_path: Path) -> None:
    variable = {SECRET_VARIABLE: new_secret()}
    with secret_descriptor(new_secret()) as descriptor:
        inherited = job_secret(tmp_path, variable | {DESCRIPTOR_VARIABLE: str(descriptor)})
        again = job_secret(None, {DESCRIPTOR_VARIABLE: str(descriptor)})
    given = job_secret(tmp_path, variable)
    assert not list(tmp_path.iterdir())
    kept = job_secret(tmp_path, {})
    assert inherited == again and len({inherited, given, kept}) == 3
    assert job_secret(tmp_path, {}) == kept


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_the_file_has_mode_600_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    code = f"import os; os.umask({umask}); from megascale.operate.channel.secret import job_secret; "
    code += f"from pathlib import Path; job_secret(Path({str(tmp_path)!r}), {{}})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (secret_file(tmp_path)).stat().st_mode & 0o777 == 0o600


def test_ranks_that_start_together_have_one_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        assert len(set(threads.map(lambda _: job_secret(tmp_path, {}), range(64)))) == 1


def refusal(folder: Path, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        job_secret(folder, env or {})
    text, count = str(raised.value).splitlines()
    assert count.startswith("1 problem") and SECRET_VARIABLE in text
    return text


def test_a_file_that_other_users_could_read_replace_or_name_is_refused(tmp_path: Path) -> None:
    file = secret_file(tmp_path)
    file.write_text(new_secret())
    file.chmod(0o640)
    assert "its mode 640 lets other users read or write it" in refusal(tmp_path)
    file.chmod(0o600)
    assert len(job_secret(tmp_path, {})) == 32
    os.chown(file, 65534, 65534)
    assert "it belongs to user 65534" in refusal(tmp_path)
    os.chown(file, os.geteuid(), os.getegid())
    elsewhere = file.rename(tmp_path / "elsewhere")
    file.symlink_to(elsewhere)
    assert "Too many levels of symbolic links" in refusal(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert "not a regular file" in refusal(tmp_path)


def test_an_empty_file_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale.operate.channel.secret.WRITE_S", 0.05)
    (secret_file(tmp_path)).touch(mode=0o600)
    assert "0 bytes are no secret" in refusal(tmp_path)


@pytest.mark.parametrize("descriptor", ["", "x", "-1", "999999", "9" * 30])
def test_a_descriptor_of_no_secret_is_refused(descriptor: str) -> None:
    with pytest.raises(ConfigError, match=DESCRIPTOR_VARIABLE):
        job_secret(None, {DESCRIPTOR_VARIABLE: descriptor})


def test_nothing_is_no_secret() -> None:
    with open(os.devnull) as file, pytest.raises(ConfigError, match="has no secret"):
        job_secret(None, {DESCRIPTOR_VARIABLE: str(file.fileno())})


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 characters; 32 or more are needed"):
        job_secret(None, {SECRET_VARIABLE: "password"})
    with pytest.raises(ConfigError, match="not set"):
        job_secret(None, {})
    assert len(job_secret(None, {SECRET_VARIABLE: "sécret-\udcff" * 8})) == 32
