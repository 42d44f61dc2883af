"""A configuration file's text as settings, each with the line it stands on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.settings.declare import Declared
from dynamo.core.settings.given import Given
from dynamo.core.settings.names import Schema, find, is_section, nearest, spellings
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.values import value_of


class Document(msgspec.Struct, frozen=True):
    """What a file says. `settings`: by dotted key; the raw value of a list of sections is a list of
    such mappings. `services`: options by service, whose sections begin with a capital letter."""

    settings: Mapping[str, Given]
    services: Mapping[str, Mapping[str, Given]]


def read_document(text: str, name: str) -> Document:
    """Settings of a YAML (or JSON) text; `name` is what messages call it. A Kubernetes ConfigMap is
    read as the file that it holds.

    Raises `ConfigError` for bad YAML, unknown keys (naming the nearest) and keys given twice with
    different values.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        root, line = _held(loader)
        return _Reader(loader, name, line).document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{name}{at}: not valid YAML: {problem}") from None


def _held(loader: Any) -> tuple[Any, int]:
    """The node with the settings, and how many lines stand before its text."""
    import yaml

    nodes = []
    while loader.check_node():
        nodes.append(loader.get_node())
    for node in nodes:
        parts = _pairs(node)
        if "kind" in parts and parts["kind"].value == "ConfigMap" and "data" in parts:
            files = [one for key, one in _pairs(parts["data"]).items() if key.endswith("yaml")]
            if files:
                return yaml.compose(files[0].value, yaml.SafeLoader), files[0].start_mark.line + 1
    if len(nodes) > 1:
        raise ConfigError("several YAML documents in one file", hint="keep the one with settings")
    return (nodes[0] if nodes else None), 0


def _pairs(node: Any) -> Mapping[str, Any]:
    return {key.value: value for key, value in node.value} if node.id == "mapping" else {}


class _Reader:
    """Walks the nodes of one text; `offset` lines stand before it in the file."""

    def __init__(self, loader: Any, name: str, offset: int) -> None:
        self._loader = loader
        self._name = name
        self._offset = offset

    def document(self, root: Any) -> Document:
        """All of it."""
        if root is None:
            return Document({}, {})
        services = {}
        if root.id == "mapping":
            own = [pair for pair in root.value if pair[0].value[:1].isupper()]
            services = {key.value: self._options(key.value, value) for key, value in own}
            root.value = [pair for pair in root.value if pair not in own]
        return Document(self.settings(root, Settings), services)

    def settings(self, node: Any, schema: Schema) -> Mapping[str, Given]:
        """What stands under `node`."""
        found: dict[str, Given] = {}
        for key, value, where in self._leaves(node, "", schema):
            declared = find(key, where, schema)
            raw = self._raw(declared, value)
            before = found.setdefault(declared.key, Given(raw, where, key))
            if not _same(declared, before.raw, raw):
                raise ConfigError(f"{declared.key} is given twice: {before.where} and {where}")
        return found

    def _raw(self, declared: Declared, node: Any) -> Any:
        if declared.entries is None or node.id != "sequence":
            return self._loader.construct_object(node, deep=True)
        return [self.settings(entry, declared.entries) for entry in node.value]

    def _leaves(self, node: Any, prefix: str, schema: Schema) -> Iterator[tuple[str, Any, str]]:
        if node.id != "mapping":
            if _empty(node):
                return
            raise ConfigError(
                f"{self._where(node)}: {prefix.rstrip('.') or 'this'} must be a mapping",
                hint="write `section:` and below it, indented, `key: value`",
            )
        for key_node, value in node.value:
            key = f"{prefix}{key_node.value}"
            where = self._where(key_node)
            if key.replace("-", "_") in spellings(schema):
                yield key, value, where
            elif is_section(key, schema):
                yield from self._leaves(value, f"{key}.", schema)
            else:
                hint = nearest(key, schema)
                raise ConfigError(f"unknown setting {key!r} ({where})", hint=hint, param=key)

    def _options(self, service: str, node: Any) -> Mapping[str, Given]:
        if node.id != "mapping" and not _empty(node):
            raise ConfigError(f"{self._where(node)}: {service} must be a mapping")
        return {
            key.value: Given(self._loader.construct_object(value, deep=True), self._where(key))
            for key, value in (node.value if node.id == "mapping" else ())
        }

    def _where(self, node: Any) -> str:
        return f"{self._name}:{node.start_mark.line + 1 + self._offset}"


def _empty(node: Any) -> bool:
    return node.id == "scalar" and node.value in {"", "~", "null"}


def _same(declared: Declared, one: Any, other: Any) -> bool:
    try:
        return one == other or bool(value_of(declared, one) == value_of(declared, other))
    except ValueError:
        return False
