"""The section of what routers know of the workers' caches."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.core.settings.declare import setting


class IndexSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What routers in mode kv know of the workers' caches."""

    budget_bytes: Annotated[
        int,
        setting(
            "memory of one index; beyond it cold branches are forgotten (15 bytes a block in long "
            "prompts)",
            unit="bytes",
            ge=1 << 20,
        ),
    ] = 256 << 20
    prediction_ttl: Annotated[
        float,
        setting(
            "how long what was sent to a worker is believed to be in its cache, where the worker "
            "sends no KV events",
            unit="seconds",
            ge=0.1,
        ),
    ] = 120.0
    shared: Annotated[
        bool,
        setting(
            "routers ask the index of `dynamo indexer` instead of keeping one each",
            flag="--shared-index",
        ),
    ] = False
    file: Annotated[
        str,
        setting("where `dynamo indexer` keeps its index over a restart; empty: nowhere"),
    ] = ""
    save_every: Annotated[
        float, setting("between two savings of that file", unit="seconds", ge=1.0)
    ] = 60.0
