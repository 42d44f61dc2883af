"""The flags of NVIDIA Dynamo's processes: tables, and their translation to settings.

A table has groups. The first line of a group says what becomes of its flags: `setting KEY`,
`plane`, `no effect: REASON`, or `refused: REASON`. A setting may have translations OLD>NEW of
values, where `!` refuses one, or a factor *NUMBER. A line of a flag has its names, its environment
variable and its kind: `value`, `list`, `set` (without a value), `on` or `off` (a switch with that
default), or `=DEFAULT`. A value that is the flag's default does nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import SettingAction
from dynamo.core.errors import ConfigError, Unsupported
from dynamo.core.settings import SourcedValue

NO_EFFECT = "no effect"
REFUSED = "refused"
SETTING = "setting"
PLANE = "plane"
SWITCHES = ("on", "off")
TRUE_WORDS = ("1", "true", "yes", "on")


class DynFlag(msgspec.Struct, frozen=True):
    """A flag of NVIDIA Dynamo. `effect` is the first word of its group and `text` the rest."""

    names: tuple[str, ...]
    variable: str
    kind: str
    effect: str
    text: str

    @property
    def takes_no_value(self) -> bool:
        """Whether the flag is a switch."""
        return self.kind == "set" or self.kind in SWITCHES

    @property
    def help(self) -> str:
        """The use of the flag here."""
        if self.effect == SETTING:
            return f"sets {self.text.partition(' ')[0]}"
        return f"chooses the {self.names[0][2:]}" if self.effect == PLANE else self._reason

    @property
    def _reason(self) -> str:
        return f"{self.effect}: {self.text}"

    def is_default(self, value: Any) -> bool:
        """Whether a value is the flag's default."""
        if self.kind in SWITCHES:
            return bool(value) == (self.kind == "on")
        return self.kind == f"={value}"

    def setting(self, value: Any, origin: str) -> tuple[str, Any]:
        """Return the key of the setting and the value there. Raises `Unsupported`."""
        key, *pairs = self.text.split()
        if pairs and pairs[0].startswith("*"):
            return key, scaled(value, float(pairs[0][1:]), origin)
        translations = dict(pair.split(">") for pair in pairs)
        word = str(value).lower() if isinstance(value, bool) else value
        if isinstance(word, str) and (new := translations.get(word)):
            if new == "!":
                raise Unsupported(f"{origin} {word} does not exist here", hint=f"see {key}")
            value = new
        if self.names[0] == "--endpoint":  # dyn://namespace.component.endpoint
            value = value.removeprefix("dyn://").partition(".")[0]
        return key, value


def scaled(value: Any, factor: float, origin: str) -> float:
    """Return a number in the unit of the setting. Raises `ConfigError`."""
    try:
        return float(value) * factor
    except ValueError:
        raise ConfigError(f"{origin}: {value!r} is no number") from None


def read_flags(name: str) -> list[DynFlag]:
    """Return the flags of a table."""
    flags: list[DynFlag] = []
    effect = text = ""
    for line in files(__package__).joinpath(f"{name}.txt").read_text().splitlines():
        if line.startswith("  "):
            names, variable, kind = line.split()
            flags.append(DynFlag(tuple(names.split(",")), variable.lstrip("-"), kind, effect, text))
        elif not line.startswith("#"):
            reason = line.startswith((NO_EFFECT, REFUSED))
            effect, _, text = line.partition(": " if reason else " ")
    return flags


def add_flags(parser: Parser, flags: Sequence[DynFlag]) -> None:
    """Add the flags, with what becomes of each as its help."""
    for index, flag in enumerate(flags):
        names = list(flag.names) if flag.names != ("-",) else []
        options: dict[str, Any] = {"metavar": "VALUE"}
        if flag.takes_no_value:
            options = {"nargs": 0}
            if flag.kind in SWITCHES:
                names += [f"--no-{name[2:]}" for name in names if name.startswith("--")]
        elif flag.kind == "list":
            options["nargs"] = "*"
        if names:
            parser.add_argument(
                *names,
                dest=str(index),
                action=SettingAction,
                default=argparse.SUPPRESS,
                help=flag.help.replace("%", "%%"),
                **options,
            )


class Translation(msgspec.Struct, frozen=True):
    """The result of flags and variables: settings, DYN_ variables of planes, notes."""

    settings: dict[str, SourcedValue] = {}
    planes: dict[str, str] = {}
    notes: list[str] = []


def translate(
    flags: Sequence[DynFlag], args: argparse.Namespace, environ: Mapping[str, str]
) -> Translation:
    """Translate the flags that were given, and the variables of the others. A later flag of the
    same setting wins. Raises `Unsupported` for those that are refused."""
    result = Translation()
    for flag, source in _given(flags, args, environ):
        if flag.effect == PLANE:
            result.planes[flag.variable] = source.raw
        elif flag.is_default(source.raw):
            continue
        elif flag.effect == SETTING:
            key, value = flag.setting(source.raw, source.origin)
            result.settings[key] = SourcedValue(value, source.origin)
        elif flag.effect == NO_EFFECT:
            result.notes.append(f"{source.origin} has no effect: {flag.text}")
        else:
            raise Unsupported(f"{source.origin} is not supported", hint=flag.text)
    return result


def _given(
    flags: Sequence[DynFlag], args: argparse.Namespace, environ: Mapping[str, str]
) -> Iterator[tuple[DynFlag, SourcedValue]]:
    """Yield the flags that were given: those of the environment first, so that flags win."""
    on_line = {flag: vars(args).get(str(index)) for index, flag in enumerate(flags)}
    for flag in flags:
        text = environ.get(flag.variable, "") if flag.variable else ""
        if text and on_line[flag] is None:
            value: Any = text.lower() in TRUE_WORDS if flag.takes_no_value else text
            value = text.split() if flag.kind == "list" else value
            if value is not False or flag.kind in SWITCHES:
                yield flag, SourcedValue(value, f"environment {flag.variable}")
    for flag, source in on_line.items():
        if source is not None:
            yield flag, source
