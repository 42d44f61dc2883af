"""Checks of the engines that a command would start, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.explain import EffectiveSetting
from dynamo.core.settings.load import DEFAULT_ORIGIN
from dynamo.core.settings.schema_engine import AUTO


def check_engines(
    parts: Iterable[Settings], origins: Mapping[str, str], *, elsewhere: bool = False
) -> list[str]:
    """Check the engine of each group of workers, and return notes on settings without effect. For
    workers that start `elsewhere`, a package that is missing here is a note.

    Raises `ConfigError` for an engine that is not installed as it should be and for arguments or
    a role that it lacks, and `Unsupported` for an engine that does not exist.
    """
    from dynamo.core.plugins import ENGINES
    from dynamo.inference.engines.arguments import check_roles, engine_arguments, explain_arguments
    from dynamo.inference.engines.packages import MissingPackage, check_engine_package

    notes: dict[str, None] = {}
    for settings in parts:
        if settings.engine.kind == AUTO:  # nothing is started that needs one
            continue
        ENGINES.check(settings.engine.kind)
        try:
            engine_arguments(settings)
            check_roles(settings)
            check_engine_package(settings.engine.kind)
        except MissingPackage as error:
            if not elsewhere:
                raise
            notes[f"{error.message}; {error.hint}"] = None
        except ConfigError as error:
            origin = origins.get(error.param or "", DEFAULT_ORIGIN)
            where = "" if origin == DEFAULT_ORIGIN else f" ({origin})"
            raise ConfigError(
                f"{error.message}{where}", hint=error.hint, param=error.param
            ) from None
        for argument in explain_arguments(settings):
            if not argument.name:
                notes[f"{argument.key}: {argument.note}"] = None
    return list(notes)


def with_argument_notes(
    rows: Iterable[EffectiveSetting], settings: Settings
) -> list[EffectiveSetting]:
    """Return the rows with the name that each setting has for the engine, or why it has none."""
    from dynamo.inference.engines.arguments import explain_arguments

    notes: dict[str, str] = {}
    try:
        for argument in explain_arguments(settings):
            notes[argument.key] = argument.note
    except ConfigError as error:
        notes[error.param or ""] = f"{error.message}: {error.hint}"
    return [replace(row, note=notes.get(row.key, row.note)) for row in rows]
