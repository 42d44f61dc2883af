"""The settings of a process that no command line starts: environment and configuration file."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings, resolve_settings
from dynamo.core.settings.secret_files import SecretFile

CONFIG_PATH_VARIABLE: Final = "DYNAMO_CONFIG_PATH"
MAX_SECRET_FILE_BYTES: Final = 1 << 20


def environment_settings() -> Settings:
    """Load the settings of `DYNAMO_...` variables and of the file that `DYNAMO_CONFIG_PATH` names.

    Blocks. Raises `ConfigError`.
    """
    path = os.environ.get(CONFIG_PATH_VARIABLE, "")
    document = read_config_file(path) if path else None
    return resolve_settings({}, os.environ, document, read_secret_file).settings


def read_config_file(path: str) -> tuple[str, str]:
    """Return text and name of a configuration file. Raises `ConfigError`."""
    try:
        return Path(path).read_text(encoding="utf-8"), path
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"configuration file {path}: {reason}",
            hint=f"check --config and ${CONFIG_PATH_VARIABLE}",
        ) from None


def read_secret_file(path: str) -> SecretFile:
    """Read the file of a secret. Raises `OSError`, `ValueError` and `RuntimeError`."""
    with Path(path).expanduser().open("rb") as file:
        content = file.read(MAX_SECRET_FILE_BYTES + 1)
        mode = os.fstat(file.fileno()).st_mode
    if len(content) > MAX_SECRET_FILE_BYTES:
        raise ValueError(f"the file is longer than {MAX_SECRET_FILE_BYTES:,} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8 text") from None
    if not text.strip():
        raise ValueError("the file is empty")
    return SecretFile(text, stat.S_ISREG(mode) and bool(mode & stat.S_IROTH))
