"""Writes settings: for one run, or to keep."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.clients.record import Client, Endpoint, SettingsFile
from headrace.clients.text import command_line
from headrace.errors import ConfigError


def write(files: Sequence[SettingsFile]) -> None:
    """They may hold a key, so only their owner may read them. Raises ConfigError."""
    for file in files:
        path = Path(file.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".headrace-")
            with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                out.write(file.text)
            Path(name).replace(path)
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror or error}") from error


def save(client: Client, endpoint: Endpoint, *, is_confirmed: bool) -> int:
    """Shows what would change, asks unless confirmed, and writes. Returns the exit code. Raises ConfigError."""
    files = [
        SettingsFile(str(Path(file.path).expanduser()), file.text)
        for file in client.settings(endpoint, str(Path(client.folder).expanduser())).files
    ]
    changed = [file for file in files if _present(file) != file.text]
    for file in changed:
        print("".join(_difference(file)), end="")
    if changed and not is_confirmed and not _agrees():
        print("nothing was changed")
        return 1
    for file in changed:
        if (backup := _back_up(Path(file.path))) is not None:
            print(f"the file as it was: {backup}")
    write(changed)
    print(f"{'saved' if changed else 'saved before'}; start it with\n{command_line(client, endpoint)}")
    return 0


def _present(file: SettingsFile) -> str | None:
    """The text that is there now; None without a file."""
    try:
        return Path(file.path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file.path} can't be read: {error.strerror or error}") from error


def _difference(file: SettingsFile) -> list[str]:
    before = _present(file)
    old = [] if before is None else before.splitlines(keepends=True)
    name = "/dev/null" if before is None else file.path
    return list(difflib.unified_diff(old, file.text.splitlines(keepends=True), name, file.path))


def _agrees() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("--save asks before it writes, and there is no terminal: --yes confirms")
    return input("write this? [y/N] ").strip().lower() in ("y", "yes")


def _back_up(path: Path) -> Path | None:
    if not path.exists():
        return None
    number = 1
    while (backup := path.with_name(f"{path.name}.{number}.bak")).exists():
        number += 1
    try:
        shutil.copy2(path, backup)
    except OSError as error:
        raise ConfigError(f"{backup} can't be written: {error.strerror or error}") from error
    return backup
