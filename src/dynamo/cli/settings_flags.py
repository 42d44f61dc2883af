"""Flags for settings, built from the settings' declarations."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, SettingSpec, SourcedValue, resolve_settings
from dynamo.core.settings.keys import REMEDIES, section_descriptions, setting_specs_by_key
from dynamo.core.settings.load import SUBSTITUTE_NOTE, UNUSED_NOTE
from dynamo.core.settings.secret_files import INSECURE_NOTE, SecretFile
from dynamo.core.settings.values import split_list, type_name
from dynamo.runtime.environment import CONFIG_PATH_VARIABLE, read_config_file, read_secret_file

MAX_NAMED_SETTINGS = 4


def add_settings_flags(parser: Parser, shown: Collection[str] | None = None) -> None:
    """Add the short flags of settings, in a group for each section, and `--section.key` for all.
    The help lists the short flags of the sections in `shown` (None = all)."""
    for section, description in section_descriptions().items():
        specs = [
            spec for spec in setting_specs_by_key().values() if spec.key.startswith(f"{section}.")
        ]
        flagged = [spec for spec in specs if spec.meta.flag and not parser.has(spec.meta.flag)]
        if flagged:
            visible = shown is None or section in shown
            group = parser.add_argument_group(section, description) if visible else parser
            for spec in flagged:
                text = flag_help(spec) if visible else argparse.SUPPRESS
                _add_flag(group, spec, spec.meta.flag, text)
        for spec in specs:
            _add_flag(parser, spec, f"--{spec.key}", argparse.SUPPRESS)
    parser.add_argument(
        "-f",
        "--config",
        metavar="FILE",
        help=f"YAML configuration file (default: ${CONFIG_PATH_VARIABLE})",
    )


def load_settings(
    args: argparse.Namespace, extra: Mapping[str, SourcedValue] | None = None
) -> LoadedSettings:
    """Load the settings and print a note on standard error for settings without effect. Values come
    from parsed flags, the environment and the configuration file. `extra` holds settings from words
    of the command line. Raises `ConfigError`."""
    loaded = read_settings(args, extra)
    if loaded.notes:
        print_unused_settings(loaded)
    return loaded


def read_settings(
    args: argparse.Namespace, extra: Mapping[str, SourcedValue] | None = None
) -> LoadedSettings:
    """Load the settings like `load_settings`, without notes."""
    flags = {key: value for key, value in vars(args).items() if isinstance(value, SourcedValue)}
    path = config_path(args)
    document = read_config_file(path) if path else None
    args.files = {path: None} if path else {}

    def read_file(path: str) -> SecretFile:
        args.files[path] = None
        return read_secret_file(path)

    return resolve_settings(flags | dict(extra or {}), os.environ, document, read_file)


def settings_files(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the files that `read_settings` read: the configuration file and those of secrets."""
    return tuple(args.files)


def config_path(args: argparse.Namespace) -> str:
    """Return the configuration file that a flag or the environment names, else an empty string."""
    return str(args.config or os.environ.get(CONFIG_PATH_VARIABLE, ""))


def print_unused_settings(loaded: LoadedSettings) -> None:
    """Print notes about settings that were given but have no effect."""
    unused = [key for key, note in loaded.notes.items() if note == UNUSED_NOTE]
    for key, note in loaded.notes.items():
        if note.endswith(SUBSTITUTE_NOTE) or note.startswith(INSECURE_NOTE):
            print(f"note: {key} ({loaded.origins[key]}) {note}", file=sys.stderr)
    if unused:
        some = ", ".join(unused[:MAX_NAMED_SETTINGS]) + (
            ", ..." if len(unused) > MAX_NAMED_SETTINGS else ""
        )
        text = f"not in use yet: {some} (`dynamo config explain` lists all settings)"
        print(f"note: {text}", file=sys.stderr)
    for key in REMEDIES.keys() & unused:
        print(f"note: {key} ({loaded.origins[key]}): {REMEDIES[key]}", file=sys.stderr)


def flag_help(spec: SettingSpec) -> str:
    """Return the help text of a setting with its default."""
    default = ",".join(spec.default) if isinstance(spec.default, tuple) else str(spec.default)
    has_default = spec.default not in ("", (), {}, None, False)
    unit = f" {spec.meta.unit}" if spec.meta.unit else ""
    text = f"{spec.meta.help} (default: {default}{unit})" if has_default else spec.meta.help
    return text.replace("%", "%%")


class SettingAction(argparse.Action):
    """Stores a value with the name of its flag. A repeated list flag appends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del parser
        previous = getattr(namespace, self.dest, None)
        raw: Any = values
        if self.nargs == 0:
            raw = not str(option_string).startswith("--no-")
        elif self.metavar == LIST_METAVAR:
            raw = [
                *(previous.raw if isinstance(previous, SourcedValue) else ()),
                *_parse_list(values, option_string),
            ]
        elif self.metavar == MAPPING_METAVAR:
            raw = [*(previous.raw if isinstance(previous, SourcedValue) else ()), values]
        setattr(namespace, self.dest, SourcedValue(raw, f"flag {option_string}"))


def _parse_list(text: Any, flag: str | None) -> Sequence[Any]:
    try:
        return split_list(str(text))
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


LIST_METAVAR = "NAME"
MAPPING_METAVAR = "NAME=VALUE"


def _add_flag(group: argparse._ActionsContainer, spec: SettingSpec, flag: str, text: str) -> None:
    kind = type_name(spec)
    names = [flag]
    options: dict[str, Any] = {"metavar": _metavar(spec, kind)}
    if kind == "bool":
        names.append(f"--no-{flag[2:]}")
        options = {"nargs": 0}
    action = group.add_argument(
        *names,
        dest=spec.key,
        action=SettingAction,
        default=argparse.SUPPRESS,
        help=text,
        **options,
    )
    action.entries = spec.meta.entries  # type: ignore[attr-defined]


def _metavar(spec: SettingSpec, kind: str) -> str:
    if spec.meta.choices:
        return "{" + ",".join(spec.meta.choices) + "}"
    if kind == "list":
        return LIST_METAVAR
    if kind == "mapping":
        return MAPPING_METAVAR
    return spec.meta.unit.upper() or {"int": "N", "float": "X"}.get(kind, "TEXT")
