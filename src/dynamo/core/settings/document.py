"""A configuration file's text as settings, each with the line it stands on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.core.settings.given import Given
from dynamo.core.settings.names import find, nearest, sections, spellings


def read_document(text: str, name: str) -> dict[str, Given]:
    """Settings of a YAML (or JSON) text; `name` is what messages call it.

    Raises `ConfigError` for bad YAML, unknown keys (naming the nearest) and keys given twice.
    """
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        found = dict(_settings(loader, root, name)) if root is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{name}{line}: not valid YAML: {problem}") from None
    finally:
        loader.dispose()
    return found


def _settings(loader: Any, root: Any, name: str) -> Iterator[tuple[str, Given]]:
    seen: dict[str, str] = {}
    for key, node, line in _leaves(loader, root, "", name):
        where = f"{name} line {line}"
        declared = find(key, where)
        if declared.key in seen:
            raise ConfigError(f"{declared.key} is given twice: {seen[declared.key]} and {where}")
        seen[declared.key] = where
        yield declared.key, Given(loader.construct_object(node, deep=True), where)


def _leaves(loader: Any, node: Any, prefix: str, name: str) -> Iterator[tuple[str, Any, int]]:
    if node.id != "mapping":
        if _empty(node):
            return
        raise ConfigError(
            f"{name} line {node.start_mark.line + 1}: {prefix or 'the file'} must be a mapping",
            hint="write `section:` and below it, indented, `key: value`",
        )
    for key_node, value in node.value:
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if key.replace("-", "_") in spellings():
            yield key, value, line
        elif _is_section(key):
            yield from _leaves(loader, value, f"{key}.", name)
        else:
            raise ConfigError(
                f"unknown setting {key!r} ({name} line {line})", hint=nearest(key), param=key
            )


def _is_section(key: str) -> bool:
    return key in sections() or any(known.startswith(f"{key}.") for known in spellings())


def _empty(node: Any) -> bool:
    return node.id == "scalar" and node.value in {"", "~", "null"}
