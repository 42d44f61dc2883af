"""The model of a command: its files, and what it is served as."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dynamo.cli.bar import Bar
from dynamo.core.settings import Settings


def names_of(settings: Settings) -> Sequence[str]:
    """What the model will be served as. Raises `ModelUnavailable` for one that cannot be."""
    from dynamo.models.location import locate

    return settings.model.names or (locate(settings.model.path).name,)


def fetch(settings: Settings) -> Sequence[str]:
    """Find or fetch the model, and prove its encoder once. Returns the names it will be served
    under. Raises `ModelUnavailable`. Blocks."""
    from dynamo.models.resolve import find_model

    with Bar(sys.stderr) as bar:
        find_model(settings.model.path, bar, with_weights=settings.engine.kind == "native")
    return names_of(settings)
