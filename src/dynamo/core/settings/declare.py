"""How one setting is declared: `Annotated[type, setting(...)]` on a field of a frozen Struct."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

Unit = Literal["", "seconds", "milliseconds", "bytes", "GiB", "tokens", "blocks", "ratio", "cores"]


class SettingMeta(msgspec.Struct, frozen=True):
    """What is known of a setting beside its type and default.

    `flag`: its command-line flag ("" = none; the dotted key works everywhere). `ge`, `le`: bounds.
    `aliases`: other spellings of its key in files (with a dot inside: a whole key; with a dot in
    front, or none: in its own section). `spellings`: (other spelling, choice) pairs. `unused`: it
    is understood, but nothing reads it yet. `not_yet`: (choice, what stands in for it) pairs; no
    stand-in: the value is kept, and refused by whoever would act on it. `reload`: safe to change
    while serving.
    """

    help: str
    flag: str = ""
    unit: Unit = ""
    ge: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    aliases: tuple[str, ...] = ()
    unused: bool = False
    not_yet: tuple[tuple[str, str], ...] = ()
    reload: bool = False
    secret: bool = False


def setting(help: str, **about: Any) -> SettingMeta:  # noqa: A002 - the word users know
    """Declare one setting. See `Setting` for what may be said."""
    return SettingMeta(help, **about)


class SettingSpec(msgspec.Struct, frozen=True):
    """One setting with its dotted key."""

    key: str
    type: Any
    default: Any
    meta: SettingMeta

    @property
    def entry_schema(self) -> type[msgspec.Struct] | None:
        """The schema of one entry, where the setting is a list of sections."""
        arguments = get_args(self.type)
        first = arguments[0] if arguments else None
        return first if isinstance(first, type) and issubclass(first, msgspec.Struct) else None


def iter_setting_specs(schema: type[msgspec.Struct], prefix: str = "") -> Iterator[SettingSpec]:
    """Every setting declared under `schema`, sections walked depth first."""
    hints = get_type_hints(schema, include_extras=True)
    for field in msgspec.structs.fields(schema):
        key = f"{prefix}{field.encode_name}"
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind, about = get_args(hint)[:2]
            default = field.default
            if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            yield SettingSpec(key, kind, default, about)
        elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from iter_setting_specs(hint, f"{key}.")
