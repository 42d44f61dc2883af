"""The settings' flags, built from their declarations."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, SettingSpec, SourcedValue, resolve_settings
from dynamo.core.settings.keys import section_descriptions, setting_specs_by_key
from dynamo.core.settings.load import SUBSTITUTE_NOTE, UNUSED_NOTE
from dynamo.core.settings.values import split_list, type_name

CONFIG_PATH_VARIABLE = "DYNAMO_CONFIG_PATH"
MAX_NAMED_SETTINGS = 4


def add_settings_flags(parser: Parser, shown: Collection[str] | None = None) -> None:
    """A flag for every setting that has one, in a group a section; `--section.key` for all. Help
    tells of the sections in `shown` (None: of all)."""
    for section, about in section_descriptions().items():
        inside = [
            one for one in setting_specs_by_key().values() if one.key.startswith(f"{section}.")
        ]
        flagged = [one for one in inside if one.meta.flag]
        if flagged:
            told = shown is None or section in shown
            group = parser.add_argument_group(section, about) if told else parser
            for declared in flagged:
                text = flag_help(declared) if told else argparse.SUPPRESS
                _add_flag(group, declared, declared.meta.flag, text)
        for declared in inside:
            _add_flag(parser, declared, f"--{declared.key}", argparse.SUPPRESS)
    parser.add_argument(
        "-f",
        "--config",
        metavar="FILE",
        help=f"configuration file, YAML (else ${CONFIG_PATH_VARIABLE})",
    )


def load_settings(
    found: argparse.Namespace,
    environ: Mapping[str, str] = os.environ,
    extra: Mapping[str, SourcedValue] | None = None,
) -> LoadedSettings:
    """The settings of parsed flags, the environment and the file that either names.

    `extra`: what words of the command line say. Tells on standard error what of it is not in use.
    Raises `ConfigError`.
    """
    loaded = read_settings(found, environ, extra)
    if loaded.notes:
        print_unused_settings(loaded)
    return loaded


def read_settings(
    found: argparse.Namespace,
    environ: Mapping[str, str] = os.environ,
    extra: Mapping[str, SourcedValue] | None = None,
) -> LoadedSettings:
    """`load_settings` without a word."""
    flags = {key: value for key, value in vars(found).items() if isinstance(value, SourcedValue)}
    path = config_path(found, environ)
    return resolve_settings(
        flags | dict(extra or {}), environ, _read_config_file(path) if path else None
    )


def config_path(found: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str:
    """The configuration file that a flag or the environment names; "" = none."""
    return str(found.config or environ.get(CONFIG_PATH_VARIABLE, ""))


def print_unused_settings(loaded: LoadedSettings) -> None:
    """What was given and has no effect, in a line or two."""
    unused = [key for key, note in loaded.notes.items() if note == UNUSED_NOTE]
    for key, note in loaded.notes.items():
        if note.endswith(SUBSTITUTE_NOTE):
            print(f"note: {key} ({loaded.origins[key]}) {note}", file=sys.stderr)
    groups = [key for key in unused if key.endswith(".replicas")]
    if groups:
        verb = "is" if len(groups) == 1 else "are"
        count = loaded.settings.engine.workers
        text = f"{' and '.join(groups)} {verb} not in use yet: --workers says how many ({count})"
        print(f"note: {text}", file=sys.stderr)
        unused = [key for key in unused if key not in groups]
    if unused:
        some = ", ".join(unused[:MAX_NAMED_SETTINGS]) + (
            ", ..." if len(unused) > MAX_NAMED_SETTINGS else ""
        )
        text = f"not in use yet: {some} (`dynamo config explain` tells of all settings)"
        print(f"note: {text}", file=sys.stderr)


def flag_help(declared: SettingSpec) -> str:
    """Help and default of one setting."""
    default = declared.default
    shown = ",".join(default) if isinstance(default, tuple) else str(default)
    known = default not in ("", (), None, False)
    unit = f" {declared.meta.unit}" if declared.meta.unit else ""
    text = f"{declared.meta.help} (default: {shown}{unit})" if known else declared.meta.help
    return text.replace("%", "%%")


class _SettingAction(argparse.Action):
    """Keeps the text and the flag that gave it; a list collects."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del parser
        before = getattr(namespace, self.dest, None)
        raw: Any = values
        if self.nargs == 0:
            raw = not str(option_string).startswith("--no-")
        elif self.metavar == LIST_METAVAR:
            raw = [
                *(before.raw if isinstance(before, SourcedValue) else ()),
                *_parse_list(values, option_string),
            ]
        setattr(namespace, self.dest, SourcedValue(raw, f"flag {option_string}"))


def _parse_list(text: Any, flag: str | None) -> Sequence[Any]:
    try:
        return split_list(str(text))
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


LIST_METAVAR = "NAME"


def _add_flag(
    where: argparse._ActionsContainer, declared: SettingSpec, flag: str, text: str
) -> None:
    kind = type_name(declared)
    names = [flag]
    options: dict[str, Any] = {"metavar": _metavar(declared, kind)}
    if kind == "bool":
        names.append(f"--no-{flag[2:]}")
        options = {"nargs": 0}
    where.add_argument(
        *names,
        dest=declared.key,
        action=_SettingAction,
        default=argparse.SUPPRESS,
        help=text,
        **options,
    )


def _metavar(declared: SettingSpec, kind: str) -> str:
    if declared.meta.choices:
        return "{" + ",".join(declared.meta.choices) + "}"
    if kind == "list":
        return LIST_METAVAR
    return declared.meta.unit.upper() or {"int": "N", "float": "X"}.get(kind, "TEXT")


def _read_config_file(path: str) -> tuple[str, str]:
    try:
        return Path(path).read_text(encoding="utf-8"), path
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"configuration file {path}: {reason}",
            hint=f"named by --config or ${CONFIG_PATH_VARIABLE}",
        ) from None
