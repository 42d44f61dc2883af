"""Settings read again while they are in use: what of them may take effect at once."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.settings.explain import REDACTED, get_setting
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.core.settings.schema import Settings


class SettingChange(msgspec.Struct, frozen=True):
    """One setting that is not what it was. `applied`: it takes effect at once, else at a start."""

    key: str
    before: Any
    after: Any
    applied: bool


def apply_reload(now: Settings, wanted: Settings) -> tuple[Settings, tuple[SettingChange, ...]]:
    """`now` with all of `wanted` that is safe to change while serving, and every difference."""
    changes = []
    for key, declared in setting_specs_by_key().items():
        before, after = get_setting(now, key), get_setting(wanted, key)
        if before == after:
            continue
        about = declared.meta
        if about.reload:
            now = _replace_at_path(now, key.split("."), after)
        if about.secret:
            before = after = REDACTED
        changes.append(SettingChange(key, before, after, about.reload))
    return now, tuple(changes)


def _replace_at_path(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    inner = _replace_at_path(getattr(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})
