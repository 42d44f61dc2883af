"""Settings: each is declared once, with unit, bounds and help. YAML keys, environment names,
flags, `--help` and the reference page follow from the declaration."""

from dynamo.core.settings.declare import SettingMeta, SettingSpec, iter_setting_specs, setting
from dynamo.core.settings.load import LoadedSettings, resolve_settings
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.values import SourcedValue

__all__ = [
    "LoadedSettings",
    "SettingMeta",
    "SettingSpec",
    "Settings",
    "SourcedValue",
    "iter_setting_specs",
    "resolve_settings",
    "setting",
]
