"""Declaration of a setting: `Annotated[type, setting(...)]` on a field of a frozen Struct."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from dynamo.core.plugins import PluginTable

Unit = Literal["", "seconds", "milliseconds", "bytes", "GiB", "tokens", "blocks", "ratio", "cores"]


class SettingMeta(msgspec.Struct, frozen=True):
    """Properties of a setting besides its type and default. `ge` and `le` are inclusive bounds.

    - `flag`: a command-line flag besides `--section.key`, which every setting has.
    - `spellings`: pairs (other spelling, choice).
    - `aliases`: other keys in files. An alias with an inner dot is a whole key, unless it begins
      with a dot. All others belong to the setting's own section.
    - `unused`: accepted and checked, but nothing reads the value yet.
    - `not_yet`: pairs (unsupported choice, substitute). A start refuses it without a substitute.
    - `plugins`: entry points of this table are choices, too.
    - `reload`: a change may be applied while serving. `secret`: never shown.
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
    plugins: PluginTable | None = None
    secret: bool = False


def setting(help: str, **properties: Any) -> SettingMeta:  # noqa: A002 - the word users know
    """Declare one setting. The properties are the fields of `SettingMeta`."""
    return SettingMeta(help, **properties)


class SettingSpec(msgspec.Struct, frozen=True):
    """A declared setting with its dotted key."""

    key: str
    type: Any
    default: Any
    meta: SettingMeta

    @property
    def entry_schema(self) -> type[msgspec.Struct] | None:
        """The schema of one entry if the setting is a list of sections, else None."""
        arguments = get_args(self.type)
        first = arguments[0] if arguments else None
        return first if isinstance(first, type) and issubclass(first, msgspec.Struct) else None


def iter_setting_specs(schema: type[msgspec.Struct], prefix: str = "") -> Iterator[SettingSpec]:
    """Yield every setting that is declared as a field under `schema`, depth first."""
    hints = get_type_hints(schema, include_extras=True)
    for field in msgspec.structs.fields(schema):
        key = f"{prefix}{field.encode_name}"
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind, meta = get_args(hint)[:2]
            default = field.default
            if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            yield SettingSpec(key, kind, default, meta)
        elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from iter_setting_specs(hint, f"{key}.")
