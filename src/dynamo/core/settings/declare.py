"""Declaration of a setting: `name: type = setting(default, help)` in a `SettingsSection`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec

from dynamo.core.plugins import PluginTable

T = TypeVar("T")
Unit = Literal["", "seconds", "milliseconds", "bytes", "GiB", "tokens", "blocks", "ratio", "cores"]


class SettingMeta(msgspec.Struct, frozen=True):
    """Properties of a setting besides its type and default. `ge` and `le` are inclusive bounds.

    - `flag`: a command-line flag besides `--section.key`, which every setting has.
    - `spellings`: pairs (other spelling, choice).
    - `aliases`: other keys in files. An alias with an inner dot is a whole key, unless it begins
      with a dot. All others belong to the setting's own section.
    - `entries`: the regular expression of an entry of a list. Several may follow one flag; a JSON
      object is one, too.
    - `unused`: accepted and checked; has no effect yet.
    - `not_yet`: pairs (unsupported choice, substitute). A start refuses it without a substitute.
    - `plugins`: entry points of this table are choices, too.
    - `reload`: a change may be applied while serving. `secret`: never shown.
    - `tuned`: the values that the tuner tries, in order.
    """

    help: str
    flag: str = ""
    unit: Unit = ""
    ge: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    aliases: tuple[str, ...] = ()
    entries: str = ""
    unused: bool = False
    not_yet: tuple[tuple[str, str], ...] = ()
    reload: bool = False
    plugins: PluginTable | None = None
    secret: bool = False
    tuned: tuple[Any, ...] = ()


class _DeclaredSetting(msgspec.Struct, frozen=True):
    default: Any
    meta: SettingMeta


def setting(default: T, help: str, **properties: Any) -> T:  # noqa: A002 - the word users know
    """Declare one setting. The properties are the fields of `SettingMeta`."""
    return cast("T", _DeclaredSetting(default, SettingMeta(help, **properties)))


class _SectionType(msgspec.StructMeta):
    """Separates the declared settings of a class body into defaults and `setting_metas`."""

    setting_metas: Mapping[str, SettingMeta]

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any
    ) -> _SectionType:
        declared = {k: v for k, v in namespace.items() if isinstance(v, _DeclaredSetting)}
        defaults = {key: setting.default for key, setting in declared.items()}
        section = super().__new__(mcls, name, bases, namespace | defaults, **config)
        inherited = getattr(section, "setting_metas", {})
        section.setting_metas = inherited | {key: row.meta for key, row in declared.items()}
        return section


class SettingsSection(
    msgspec.Struct, metaclass=_SectionType, frozen=True, forbid_unknown_fields=True
):
    """A section of the settings. Its fields are settings and further sections."""


class SettingSpec(msgspec.Struct, frozen=True):
    """A declared setting with its dotted key."""

    key: str
    type: Any
    default: Any
    meta: SettingMeta

    @property
    def entry_schema(self) -> type[SettingsSection] | None:
        """The schema of one entry if the setting is a list of sections, else None."""
        first = next(iter(get_args(self.type)), None)
        return first if isinstance(first, _SectionType) else None


def iter_setting_specs(schema: type[SettingsSection], prefix: str = "") -> Iterator[SettingSpec]:
    """Yield every setting that is declared as a field under `schema`, depth first."""
    for field in msgspec.structs.fields(schema):
        key = f"{prefix}{field.name}"
        meta = schema.setting_metas.get(field.name)
        if meta is not None:
            is_mapping = field.default is msgspec.NODEFAULT  # msgspec makes an empty one each time
            yield SettingSpec(key, field.type, {} if is_mapping else field.default, meta)
        else:
            yield from iter_setting_specs(field.type, f"{key}.")
