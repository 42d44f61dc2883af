"""Parsing of configuration files. Every value keeps its file and line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from dynamo.core.adapters import parse_lora_modules
from dynamo.core.errors import ConfigError
from dynamo.core.settings.declare import SettingSpec
from dynamo.core.settings.keys import (
    SettingsSchema,
    canonical_keys,
    find_setting,
    is_section,
    nearest_key_hint,
)
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.values import SourcedValue, parse_value


class ConfigDocument(msgspec.Struct, frozen=True):
    """The content of a configuration file: settings by dotted key, and options by service.

    The raw value of a list of sections is a list of such mappings. Names of services begin with a
    capital letter.
    """

    settings: Mapping[str, SourcedValue]
    services: Mapping[str, Mapping[str, SourcedValue]]


def parse_config_document(text: str, name: str) -> ConfigDocument:
    """Parse a YAML or JSON text, or the file inside a Kubernetes ConfigMap.

    `name` stands for the file in messages. Raises `ConfigError` for invalid YAML, unknown keys
    (with the nearest key) and keys with two different values.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        root, line = _settings_node(loader)
        return _DocumentReader(loader, name, line).read_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{name}{at}: not valid YAML: {problem}") from None


def _settings_node(loader: Any) -> tuple[Any, int]:
    """Return the root node of the settings and the number of lines before its text."""
    import yaml

    nodes = []
    while loader.check_node():
        nodes.append(loader.get_node())
    for node in nodes:
        items = _mapping_items(node)
        if "kind" in items and items["kind"].value == "ConfigMap" and "data" in items:
            data = _mapping_items(items["data"])
            files = [file for key, file in data.items() if key.endswith("yaml")]
            if files:
                return yaml.compose(files[0].value, yaml.SafeLoader), files[0].start_mark.line + 1
    if len(nodes) > 1:
        raise ConfigError("several YAML documents in one file", hint="keep the one with settings")
    return (nodes[0] if nodes else None), 0


def _mapping_items(node: Any) -> Mapping[str, Any]:
    return {key.value: value for key, value in node.value} if node.id == "mapping" else {}


class _DocumentReader:
    """Reads the YAML nodes of one text. `offset` is the number of lines before it in the file."""

    def __init__(self, loader: Any, name: str, offset: int) -> None:
        self._loader = loader
        self._name = name
        self._line_offset = offset

    def read_document(self, root: Any) -> ConfigDocument:
        """Read all settings and services under the root node."""
        if root is None:
            return ConfigDocument({}, {})
        services = {}
        if root.id == "mapping":
            pairs = [pair for pair in root.value if pair[0].value[:1].isupper()]
            services = {key.value: self._service_options(key.value, value) for key, value in pairs}
            root.value = [pair for pair in root.value if pair not in pairs]
        return ConfigDocument(self.read_settings(root, Settings), services)

    def read_settings(self, node: Any, schema: SettingsSchema) -> Mapping[str, SourcedValue]:
        """Read the settings under `node`, keyed by dotted key."""
        settings: dict[str, SourcedValue] = {}
        for key, value, origin in self._walk_leaves(node, "", schema):
            spec = find_setting(key, origin, schema)
            raw = self._raw_value(spec, value)
            first = settings.setdefault(spec.key, SourcedValue(raw, origin, key))
            if not _same_value(spec, first.raw, raw):
                raise ConfigError(f"{spec.key} is given twice: {first.origin} and {origin}")
        return settings

    def _raw_value(self, spec: SettingSpec, node: Any) -> Any:
        if spec.entry_schema is None or node.id != "sequence":
            return self._loader.construct_object(node, deep=True)
        return [self.read_settings(entry, spec.entry_schema) for entry in node.value]

    def _walk_leaves(
        self, node: Any, prefix: str, schema: SettingsSchema
    ) -> Iterator[tuple[str, Any, str]]:
        if node.id != "mapping":
            if _is_empty(node):
                return
            raise ConfigError(
                f"{self._origin_of(node)}: {prefix.rstrip('.') or 'this'} must be a mapping",
                hint="write `section:` and below it, indented, `key: value`",
            )
        for key_node, value in node.value:
            key = f"{prefix}{key_node.value}"
            origin = self._origin_of(key_node)
            is_key = key.replace("-", "_") in canonical_keys(schema)
            if is_key and (value.id != "mapping" or not is_section(key, schema)):
                yield key, value, origin
            elif is_section(key, schema):
                yield from self._walk_leaves(value, f"{key}.", schema)
            else:
                hint = nearest_key_hint(key, schema)
                raise ConfigError(f"unknown setting {key!r} ({origin})", hint=hint, param=key)

    def _service_options(self, service: str, node: Any) -> Mapping[str, SourcedValue]:
        if node.id != "mapping" and not _is_empty(node):
            raise ConfigError(f"{self._origin_of(node)}: {service} must be a mapping")
        return {
            key.value: SourcedValue(
                self._loader.construct_object(value, deep=True), self._origin_of(key)
            )
            for key, value in (node.value if node.id == "mapping" else ())
        }

    def _origin_of(self, node: Any) -> str:
        return f"{self._name}:{node.start_mark.line + 1 + self._line_offset}"


def _is_empty(node: Any) -> bool:
    return node.id == "scalar" and node.value in {"", "~", "null"}


def _same_value(spec: SettingSpec, first: Any, second: Any) -> bool:
    try:
        return first == second or bool(parse_value(spec, first) == parse_value(spec, second))
    except ValueError:
        return False


def edit_models(text: str, entry: Mapping[str, Any] | None, name: str) -> str:
    """Return a YAML text with another entry in its list `models`, or without one. Raises
    `ValueError`."""

    models = _read_sections(text).get("models")
    if models is None or models.id != "sequence" or models.flow_style:
        raise ValueError("it has no block list `models:` with lines that begin with `- `")
    lines = text.splitlines(keepends=True)
    if entry is not None:
        end = _last_line(text, lines, models.value[-1])
        lines[end - 1] = lines[end - 1].rstrip("\n") + "\n"
        indent = " " * models.start_mark.column
        lines.insert(end, f"{indent}- {msgspec.json.encode(entry).decode()}\n")
        return "".join(lines)
    for node in models.value:
        if name == _first_name(node):
            del lines[node.start_mark.line : _last_line(text, lines, node)]
            return "".join(lines)
    raise ValueError(f"no entry of `models` begins its names with {name!r}")


def edit_adapters(text: str, model: str, changes: Mapping[str, str]) -> str:
    """Return a YAML text with other folders of a model's adapters; "" deletes one. A model has them
    in its entry of `models`, or in the section `model`. Raises `ValueError`."""
    node = next((node for node in _model_nodes(text) if _first_name(node) == model), None)
    if node is None and "models" not in (sections := _read_sections(text)):
        node = sections.get("model")
    if node is None or node.id != "mapping" or not node.value:
        raise ValueError(f"it has no section of its own for {model!r}")
    old = next(((key, own) for key, own in node.value if key.value == "adapters"), None)
    adapters = _read_adapters(old[1]) if old else {}
    adapters.update(changes)
    folders = {name: folder for name, folder in adapters.items() if folder}
    return _with_value(text, node, old, "adapters", folders)


def edit_alias(text: str, alias: str, model: str) -> str:
    """Return a YAML text in which `alias` is a name of that model in its list `models`, and of no
    other one; of none if `model` is empty. Raises `ValueError`."""
    models = [_first_name(node) for node in _model_nodes(text)]
    if model and model not in models:
        raise ValueError(f"no entry of `models` begins its names with {model!r}")
    for index, first in enumerate(models):
        node = _model_nodes(text)[index]
        old = next(((key, own) for key, own in node.value if key.value in {"names", "name"}), None)
        names = _names(node)
        others = [name for name in names if name != alias]
        changed = [*others, alias] if first == model else others
        if changed and sorted(changed) != sorted(names):
            text = _with_value(text, node, old, "names", changed)
    return text


def _model_nodes(text: str) -> Sequence[Any]:
    """Return the entries of the list `models`, none without one. Raises `ValueError`."""
    models = _read_sections(text).get("models")
    return models.value if models is not None and models.id == "sequence" else ()


def _with_value(text: str, node: Any, old: Any, key: str, value: Any) -> str:
    """Return a text with another value of a key of a mapping, which had the pair `old` of nodes."""
    value = msgspec.json.encode(value).decode()
    if node.flow_style:
        first = node.value[0][0].start_mark.index
        begin, end = (old[0].start_mark.index, old[1].end_mark.index) if old else (first, first)
        return f'{text[:begin]}"{key}": {value}{"" if old else ", "}{text[end:]}'
    lines = text.splitlines(keepends=True)
    if old is not None:
        begin = old[0].start_mark.line
        line = f"{lines[begin][: old[0].start_mark.column]}{key}: {value}\n"
        lines[begin : _last_line(text, lines, old[1])] = [line]
    else:
        end = _last_line(text, lines, node)
        lines[end - 1] = lines[end - 1].rstrip("\n") + "\n"
        lines.insert(end, f"{' ' * node.value[0][0].start_mark.column}{key}: {value}\n")
    return "".join(lines)


def _read_sections(text: str) -> Mapping[str, Any]:
    """Return the nodes of a YAML text's sections by name. Raises `ValueError`."""
    import yaml

    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML now: {' '.join(str(error).split())}") from None
    return _mapping_items(root) if root is not None else {}


def _read_adapters(node: Any) -> dict[str, str]:
    import yaml

    value = yaml.SafeLoader("").construct_object(node, deep=True)
    items = [value] if isinstance(value, str | Mapping) else value or []
    texts = (x if isinstance(x, str) else msgspec.json.encode(x).decode() for x in items)
    return dict(parse_lora_modules(tuple(texts)))


def _first_name(node: Any) -> str:
    """Return the id of the model of an entry of `models`: its first name, else its path's last."""
    return next(iter(_names(node)), "")


def _names(node: Any) -> Sequence[str]:
    import yaml

    values = yaml.SafeLoader("").construct_object(node, deep=True)
    names = values.get("names", values.get("name")) or PurePath(values.get("path", "")).name
    return [names] if isinstance(names, str) else names


def _last_line(text: str, lines: Sequence[str], node: Any) -> int:
    """Return the number of the line after a node, without the comments that follow it."""
    mark, ends_line = node.end_mark, node.id == "scalar" or node.flow_style
    end: int = mark.line + (ends_line or bool(mark.index == len(text) and mark.column))
    while lines[end - 1].strip().startswith("#") or not lines[end - 1].strip():
        end -= 1  # PyYAML counts what follows a node as a part of it
    return end
