"""Settings: declared once, with unit, bound and reason; YAML, environment, flags, help and the
reference page follow from the declaration."""

from dynamo.core.settings.declare import Declared, Setting, setting, settings_of
from dynamo.core.settings.given import Given
from dynamo.core.settings.load import Loaded, load
from dynamo.core.settings.schema import Settings

__all__ = [
    "Declared",
    "Given",
    "Loaded",
    "Setting",
    "Settings",
    "load",
    "setting",
    "settings_of",
]
