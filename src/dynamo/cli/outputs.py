"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

from dynamo.core.errors import ConfigError


def check_writable(*paths: str | None) -> None:
    """Before the work, not after it; None and "-" (standard output) are no files. Raises
    `ConfigError`."""
    for path in paths:
        if path is None or path == "-":
            continue
        target = Path(path)
        place = target if target.exists() else target.parent
        if target.is_dir() or not os.access(place, os.W_OK):
            raise ConfigError(f"cannot write {path}", hint="a file in a folder that is there")
