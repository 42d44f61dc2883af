"""`dynamo config`: what a configuration comes to, and the schema of its files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, read_settings
from dynamo.core.errors import ConfigError
from dynamo.core.settings.explain import EffectiveSetting, effective_settings
from dynamo.core.settings.json_schema import json_schema
from dynamo.core.settings.load import DEFAULT_ORIGIN

EXAMPLES = """\
  dynamo config explain configs/agg.yaml               every setting
  dynamo config explain configs/agg.yaml --changed     what differs from the defaults
  dynamo config explain --json --http-port 8080        flags and environment count too
  dynamo config schema > dynamo.schema.json            for editors"""


def parser() -> Parser:
    """The words, `--json`, `--all`, and a flag for every setting that has one."""
    made = Parser(
        "dynamo config",
        "Explain a configuration: every effective value, where it came from and its unit; or print "
        "the JSON Schema of configuration files.",
        EXAMPLES,
        usage="explain [FILE] [--json] [--changed] [FLAGS of dynamo run] | schema",
    )
    made.add_argument(
        "what", choices=("explain", "schema"), metavar="explain|schema", help="what to print"
    )
    made.add_argument("file", nargs="?", metavar="FILE", help="configuration file")
    made.add_argument("--json", action="store_true", help="one JSON object, all settings")
    made.add_argument(
        "--changed", action="store_true", help="only what differs from the defaults, and notes"
    )
    add_settings_flags(made)
    return made


def run(arguments: Sequence[str]) -> int:
    """Print."""
    found = parser().parse(arguments)
    print(_schema() if found.what == "schema" else _format_settings(found))
    return 0


def _schema() -> str:
    return msgspec.json.format(msgspec.json.encode(json_schema())).decode()


def _format_settings(found: argparse.Namespace) -> str:
    if found.file and found.config:
        raise ConfigError("two files are named", hint="give FILE, or --config FILE")
    found.config = found.file or found.config
    loaded = read_settings(found)
    rows = list(effective_settings(loaded))
    services = {
        service: {key: {"value": one.raw, "origin": one.origin} for key, one in options.items()}
        for service, options in loaded.services.items()
    }
    if found.json:
        whole = {"settings": rows, "services": services}
        return msgspec.json.format(msgspec.json.encode(whole)).decode()
    if found.changed:
        rows = [one for one in rows if one.origin != DEFAULT_ORIGIN]
    return "\n".join([*settings_table(rows), *_service_lines(services)])


def settings_table(rows: Sequence[EffectiveSetting]) -> Iterator[str]:
    """A line a setting, in sections."""
    width = max((len(one.key) for one in rows), default=0)
    values = {one.key: format_value_with_unit(one) for one in rows}
    room = min(40, max(map(len, values.values()), default=0))
    section = ""
    for one in rows:
        head = one.key.partition(".")[0]
        if section not in {"", head}:
            yield ""
        section = head
        note = f"   ({one.note})" if one.note else ""
        yield f"{one.key:<{width}}  {values[one.key]:<{room}}  {one.origin}{note}"


def format_value_with_unit(one: EffectiveSetting) -> str:
    """A value with its unit."""
    return format_value(one.value) + (f" {one.unit}" if one.unit and one.value is not None else "")


def format_value(value: Any) -> str:
    """A value as one would write it in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value) or '""'


def _service_lines(services: dict[str, Any]) -> Iterator[str]:
    for service, options in services.items():
        yield ""
        for key, one in options.items():
            yield f"{service}.{key}  {format_value(one['value'])}  {one['origin']}"
