"""The model that a command serves: its files and its names."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dynamo.cli.progress_bar import ProgressBar
from dynamo.core.plugins import engine_needs_weights
from dynamo.core.settings import Settings


def served_model_names(settings: Settings) -> Sequence[str]:
    """Return the names that the model is served under. Raises `ModelUnavailable`."""
    from dynamo.models.location import locate_model

    return settings.model.names or (locate_model(settings.model.path).name,)


def fetch_model(settings: Settings) -> Sequence[str]:
    """Find or download the model and verify its tokenizer once. Returns the names that the model is
    served under. Raises `ModelUnavailable`. Blocks."""
    from dynamo.models.resolve import resolve_model_blocking

    with ProgressBar(sys.stderr) as bar:
        resolve_model_blocking(
            settings.model.path, bar, with_weights=engine_needs_weights(settings.engine.kind)
        )
    return served_model_names(settings)
