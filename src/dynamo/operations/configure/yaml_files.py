"""YAML files: the data of the configurator, configurations that it reads, and those it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.core.errors import ConfigError


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file. Raises `ConfigError`."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "problem", None) or error
        if mark := getattr(error, "problem_mark", None):
            reason = f"{reason} in line {mark.line + 1}"
        raise ConfigError(f"cannot read {path}: {reason}", hint="name a YAML file") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds no mapping of names to values")
    return content


def write_yaml(content: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Return the text of a YAML file with its notes ahead."""
    import yaml

    lines = "".join(f"# {note}\n" for note in notes)
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    return lines + text
