"""The component `modelstore`: a process that keeps models for the workers of a cluster, and asks
sources in their place."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dynamo.communication.directory import RecordChange, follow_records
from dynamo.core.errors import DynamoError
from dynamo.core.settings import Settings
from dynamo.models.downloads.sources import parse_spec
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process import run_process
from dynamo.services.model_store.download import fetch_model
from dynamo.services.model_store.files import STORE_COMPONENT
from dynamo.services.model_store.records import SMALL_KEY, decode_records, parse_key, store_prefix
from dynamo.services.model_store.store import ModelStore, open_model_store

log = logging.getLogger(__name__)


class ModelKeeper:
    """Fetches each model that a process of the namespace begins to fetch."""

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self._busy: set[str] = set()
        runtime = store.runtime
        self._prefix = store_prefix(runtime.settings.runtime.namespace)
        runtime.tasks.start(
            follow_records(runtime.discovery, self._prefix, self._apply, runtime.clock), "models"
        )

    def _apply(self, batch: Sequence[RecordChange], replaces: bool) -> None:
        del replaces
        values = {change.key: change.value for change in batch if change.value is not None}
        for name, record in decode_records(values, self._prefix).items():
            key, instance = parse_key(name)
            if instance == self._store.runtime.instance_id:
                continue
            if record.state == "fetching" and not record.is_store and key not in self._busy:
                self._busy.add(key)
                self._store.runtime.tasks.start(self._fetch(key), f"keep {key}")

    async def _fetch(self, key: str) -> None:
        spec = parse_spec(key.removesuffix(SMALL_KEY))
        try:
            if spec is not None:
                with_weights = not key.endswith(SMALL_KEY)
                await fetch_model(self._store, spec, _log_progress, with_weights=with_weights)
        except DynamoError as error:
            fields = {"model": key, "error": error.message}
            log.warning("a model cannot be kept", extra={"fields": fields})
        finally:
            self._busy.discard(key)


def _log_progress(step: str, done: int, total: int) -> None:
    if not (done or total):
        log.info("model store", extra={"fields": {"step": step}})


async def attach(runtime: DistributedRuntime) -> None:
    """Keep models until the runtime shuts down."""
    ModelKeeper(await open_model_store(runtime, is_store=True))
    log.info("model store serves")


def run_model_store(settings: Settings) -> int:
    """Run the process and return its exit code."""
    return run_process(attach, settings, STORE_COMPONENT)
