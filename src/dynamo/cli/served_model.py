"""The model of a command: its files, and what it is served as."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dynamo.cli.progress_bar import ProgressBar
from dynamo.core.plugins import engine_needs_weights
from dynamo.core.settings import Settings


def served_model_names(settings: Settings) -> Sequence[str]:
    """What the model will be served as. Raises `ModelUnavailable` for one that cannot be."""
    from dynamo.models.location import locate_model

    return settings.model.names or (locate_model(settings.model.path).name,)


def fetch_model(settings: Settings) -> Sequence[str]:
    """Find or fetch the model, and prove its encoder once. Returns the names it will be served
    under. Raises `ModelUnavailable`. Blocks."""
    from dynamo.models.resolve import resolve_model_blocking

    with ProgressBar(sys.stderr) as bar:
        resolve_model_blocking(
            settings.model.path, bar, with_weights=engine_needs_weights(settings.engine.kind)
        )
    return served_model_names(settings)
