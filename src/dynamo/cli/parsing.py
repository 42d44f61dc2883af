"""Parts that commands share: the argument parser, constants, output files, model names, tables."""

from __future__ import annotations

import argparse
import os
import re
import signal
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo.core.settings.values import FALSE_WORDS, TRUE_WORDS

if TYPE_CHECKING:
    from dynamo.core.settings import Settings

API_KEY_VARIABLE = "DYNAMO_API_KEY"
DEPLOYMENT_HELP = "name or port of the deployment, if several run here"
EXIT_INTERRUPTED = 128 + signal.SIGINT
DESCRIPTION_WIDTH = 100
"""Columns of a command's description. The flags follow the terminal's width."""
_NEGATIVE = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)


def check_writable(*paths: str | None) -> None:
    """Raise `ConfigError` if a file cannot be written. None and "-" (standard output) pass."""
    for path in paths:
        if path is None or path == "-":
            continue
        target = Path(path)
        existing = target if target.exists() else target.parent
        if target.is_dir() or not os.access(existing, os.W_OK):
            raise ConfigError(f"cannot write {path}", hint="name a file in a writable folder")


def write_file(path: str | Path, data: bytes) -> None:
    """Write a file that the user has named; "-" prints. Raises `ConfigError`."""
    if path == "-":
        print(data.decode(), end="")
        return
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: str | Path, value: object) -> None:
    """Write a value as JSON with a line for each field, like `write_file`."""
    write_file(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def served_model_names(settings: Settings) -> Sequence[str]:
    """Return the names that the model is served under, or the first name of each of several. Raises
    `ModelUnavailable` and `ConfigError`."""
    from dynamo.services.deployment.model_groups import model_names, unique_model_names

    if settings.models:
        return [names[0] for names in unique_model_names(settings)]
    return model_names(settings) or ("the servers' model",)


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


class Flag(NamedTuple):
    """A row of a command's flags. A default of False makes a switch. A default other than 0 is part
    of the help, and a number is parsed as the default's type without a `parse`."""

    names: str
    help: str
    default: Any = None
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    choices: Sequence[str] | None = None


class Parser(argparse.ArgumentParser):
    """A parser for flags and words in any order. Its errors are `ConfigError` with a hint."""

    def __init__(self, prog: str, description: str, examples: str = "", usage: str = "") -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}" if usage else None,
            description="\n".join(
                textwrap.fill(line, DESCRIPTION_WIDTH, break_on_hyphens=False)
                for line in description.splitlines()
            ),
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )

    def has(self, flag: str) -> bool:
        """Return whether the command has a flag of its own with this name."""
        return flag in self._option_string_actions

    def add_flags(self, groups: Mapping[str, Sequence[Flag]]) -> None:
        """Add flags by the title of their group in the help."""
        for title, flags in groups.items():
            group = self.add_argument_group(title)
            for names, text, default, metavar, parse, choices in flags:
                if default is False:
                    group.add_argument(*names.split(), action="store_true", help=text)
                    continue
                is_number = isinstance(default, int | float)
                group.add_argument(
                    *names.split(),
                    type=parse or (type(default) if is_number else str),
                    default=default,
                    metavar=metavar,
                    choices=choices,
                    help=f"{text} (default: {default:g})" if is_number and default else text,
                )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse arguments. Raises `ConfigError` for wrong ones; `--help` exits."""
        words = self._repeat_flags(self._read_switches(arguments))
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            hint = self._suggest_flag(unknown[0])
            raise ConfigError(f"unknown argument {unknown[0]!r}", hint=hint)
        return args

    def _read_switches(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments with `--no-FLAG` in place of `--FLAG false`, and so on, and with
        `--FLAG=-1s` in place of `--FLAG -1s`, which argparse takes for another flag."""
        words: list[str] = []
        for word in arguments:
            flag, equals, value = word.partition("=")
            if words and _NEGATIVE.match(word) and self._wants_value(words[-1]):
                words[-1] = f"{words[-1]}={word}"
            elif switch := self._find_switch(flag, value) if equals else "":
                words.append(switch)
            elif words and (switch := self._find_switch(words[-1], word)):
                words[-1] = switch
            else:
                words.append(word)
        return words

    def _wants_value(self, flag: str) -> bool:
        """Return whether a word is the name of a flag that takes one value."""
        action = self._option_string_actions.get(flag)
        return action is not None and action.nargs is None

    def _find_switch(self, flag: str, value: str) -> str:
        """Return the form of `flag` without a value that means `value`; "" if there is none."""
        action = self._option_string_actions.get(flag)
        off = f"--no-{flag[2:]}"
        if action is None or off not in action.option_strings:
            return ""
        if value.lower() in TRUE_WORDS:
            return flag
        return off if value.lower() in FALSE_WORDS else ""

    def _repeat_flags(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments with a flag before each of several entries that follow it once."""
        words: list[str] = []
        flag = entries = ""
        has_value = False
        for word in arguments:
            if word.startswith("-"):
                flag, equals, _ = word.partition("=")
                entries = getattr(self._option_string_actions.get(flag), "entries", "")
                has_value = bool(equals)
            elif entries and has_value:
                if re.fullmatch(entries, word, re.DOTALL):
                    words.append(flag)
                else:
                    entries = ""
            else:
                has_value = True
            words.append(word)
        return words

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as `ConfigError`."""
        message = re.sub(r"invalid _\w+ value", "invalid value", message)  # a parser of ours
        raise ConfigError(message, hint=f"see `{self.prog} --help`")

    @staticmethod
    def _metavar(action: argparse.Action) -> str:
        return "" if action.option_strings else str(action.metavar)

    def _suggest_flag(self, wrong: str) -> str:
        flag = wrong.partition("=")[0]
        if flag == "--url" and any(action.metavar == "URL" for action in self._actions):
            return f"the URL is an argument without a flag: `{self.prog} URL`"
        if flag in {"--model", "-m"} and any("MODEL" in self._metavar(a) for a in self._actions):
            return f"the model is an argument without a flag: `{self.prog} MODEL`"
        if flag == "--model" and "--http-port" in self._option_string_actions:
            return "the model is model.path in a file of --config, or DYNAMO_MODEL__PATH"
        if flag in {"--api-key", "--api-keys"} and "--http-port" in self._option_string_actions:
            return (
                "the keys that clients must send are server.api_keys in a file of --config, or "
                "DYNAMO_SERVER__API_KEYS=KEY in the environment"
            )
        flags = [option for action in self._actions for option in action.option_strings]
        return nearest_name_hint(flag, flags, f"see `{self.prog} --help`")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats help with a wide column for flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return `-f, --config FILE`, the format of Python 3.13 and later."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"
