"""Settings: declared once, with unit, bound and reason; YAML, environment, flags, help and the
reference page follow from the declaration."""

from dynamo.core.settings.declare import Setting, setting, settings_of
from dynamo.core.settings.schema import Settings

__all__ = ["Setting", "Settings", "setting", "settings_of"]
