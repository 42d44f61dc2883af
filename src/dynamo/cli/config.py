"""`dynamo config`: explain or check a configuration, or print the schema of its files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dynamo.cli.engine_check import with_argument_notes
from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, load_settings, read_settings
from dynamo.core.errors import ConfigError
from dynamo.core.redaction import redact
from dynamo.core.settings.explain import EffectiveSetting, effective_settings
from dynamo.core.settings.json_schema import json_schema
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.core.settings.load import DEFAULT_ORIGIN

EXAMPLES = """\
  dynamo config explain serve.yaml                     every setting
  dynamo config explain serve.yaml --changed           settings that differ from the defaults
  dynamo config explain --json --http-port 8080        with flags and environment
  dynamo config check serve.yaml                       would `dynamo run -f FILE` start?
  dynamo config schema > dynamo.schema.json            schema for editors"""


def parser() -> Parser:
    """Return the parser: explain, check or schema, the file, and the settings' flags."""
    parser = Parser(
        "dynamo config",
        "Explain a configuration: every effective value with its unit and origin. Or check that "
        "`dynamo run` can start with it, or print the JSON Schema of configuration files. "
        "`dynamo configure` writes a configuration for GPUs and a load.",
        EXAMPLES,
        usage="explain [FILE] [--json] [--changed] [FLAGS of dynamo run] | check [FILE] | schema",
    )
    parser.add_argument(
        "what",
        choices=("explain", "check", "schema"),
        metavar="explain|check|schema",
        help="what to do",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="configuration file")
    parser.add_argument("--json", action="store_true", help="print all settings as a JSON object")
    parser.add_argument(
        "--changed", action="store_true", help="print only settings that differ from the defaults"
    )
    add_settings_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print the schema or the effective settings, or check these."""
    args = parser().parse(arguments)
    if args.what == "schema":
        print(msgspec.json.format(msgspec.json.encode(json_schema())).decode())
        return 0
    if args.file and args.config:
        raise ConfigError("two configuration files", hint="give either FILE or --config FILE")
    if args.file in setting_specs_by_key():
        hint = f"`dynamo config explain | grep {args.file}`"
        raise ConfigError(f"{args.file} is a setting, and FILE is a configuration file", hint=hint)
    args.config = args.file or args.config
    if args.what == "check":
        print(_check_settings(args))
    else:
        print(redact(_format_settings(args)))
    return 0


def _check_settings(args: argparse.Namespace) -> str:
    """Return the processes that `dynamo run` would start. Raises `ConfigError`."""
    from dynamo.cli.parsing import served_model_names
    from dynamo.cli.run import checked_settings, print_note
    from dynamo.services.deployment.launch import deployment_specs

    settings = checked_settings(load_settings(args), print_note)
    served_model_names(settings)
    names = ", ".join(spec.name for spec in deployment_specs(settings))
    return f"the configuration is valid: `dynamo run` starts {names}"


def _format_settings(args: argparse.Namespace) -> str:
    loaded = read_settings(args)
    rows = with_argument_notes(effective_settings(loaded), loaded.settings)
    services = {
        service: {
            key: {"value": value.raw, "origin": value.origin} for key, value in options.items()
        }
        for service, options in loaded.services.items()
    }
    if args.json:
        encoded = msgspec.json.encode({"settings": rows, "services": services})
        return msgspec.json.format(encoded).decode()
    if args.changed:
        rows = [row for row in rows if row.origin != DEFAULT_ORIGIN]
    return "\n".join([*settings_table(rows), *_service_lines(services)])


def settings_table(rows: Sequence[EffectiveSetting]) -> Iterator[str]:
    """Yield a line for each setting, with an empty line between sections."""
    key_width = max((len(row.key) for row in rows), default=0)
    values = {row.key: format_value_with_unit(row) for row in rows}
    value_width = min(40, max(map(len, values.values()), default=0))
    section = ""
    for row in rows:
        row_section = row.key.partition(".")[0]
        if section not in {"", row_section}:
            yield ""
        section = row_section
        note = f"   ({row.note})" if row.note else ""
        yield f"{row.key:<{key_width}}  {values[row.key]:<{value_width}}  {row.origin}{note}"


def format_value_with_unit(row: EffectiveSetting) -> str:
    """Format a setting's value with its unit."""
    return format_value(row.value) + (f" {row.unit}" if row.unit and row.value is not None else "")


def format_value(value: Any) -> str:
    """Format a value as in a configuration file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{name}: {format_value(item)}" for name, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value) or '""'


def _service_lines(services: dict[str, Any]) -> Iterator[str]:
    for service, options in services.items():
        yield ""
        for key, option in options.items():
            yield f"{service}.{key}  {format_value(option['value'])}  {option['origin']}"
