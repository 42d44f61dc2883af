"""Groups of equal worker processes: workers with both roles, prefill workers, decode workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_cluster import WorkerGroupSettings

log = logging.getLogger(__name__)


class ReplicaGroup(NamedTuple):
    """`replicas` equal processes, which run the service of `role` with `settings`."""

    role: str
    name: str
    replicas: int
    settings: Settings


def worker_groups(settings: Settings) -> Sequence[ReplicaGroup]:
    """Return the groups of workers that the settings name."""
    groups = [
        *role_groups(settings, "prefill"),
        *role_groups(settings, "decode"),
        ReplicaGroup("worker", "worker", settings.engine.workers, settings),
    ]
    return [group for group in groups if group.replicas]


def answering_groups(settings: Settings) -> Sequence[ReplicaGroup]:
    """Return the groups of workers. Raises `ConfigError` if none of them computes answers."""
    groups = worker_groups(settings)
    if groups and all(group.settings.engine.role == "prefill" for group in groups):
        raise ConfigError(
            "prefill workers without a worker that computes answers",
            hint="add --decode-workers N; `dynamo run in=none` starts prefill workers alone",
        )
    return groups


def check_disaggregation(settings: Settings) -> None:
    """Check that the workers suit `router.disaggregation.mode`. Raises `ConfigError` for `always`
    if every worker computes its own prompts. Decode workers alone are a warning, since prefill
    workers of other hosts may join them."""
    if settings.router.disaggregation.effective_mode != "always":
        return
    roles = {group.settings.engine.role for group in worker_groups(settings)}
    if roles == {"both"}:
        raise ConfigError(
            "--disagg always, but no worker is a prefill worker",
            hint="add --prefill-workers N and --decode-workers N, or use --flexible-workers N, "
            "which compute prompts for each other",
        )
    if roles and "prefill" not in roles:
        log.warning(
            "no prefill worker is started here: decode workers compute prompts until one joins",
            extra={"fields": {"router.disaggregation.mode": "always"}},
        )


def role_groups(settings: Settings, role: str) -> Iterator[ReplicaGroup]:
    """Yield the groups of workers with only that role. A group of a list is not empty."""
    groups_by_role: Mapping[str, Sequence[WorkerGroupSettings]] = {
        "prefill": (settings.workers.prefill, *settings.prefill_workers),
        "decode": (settings.workers.decode, *settings.decode_workers),
    }
    groups = groups_by_role.get(role, ())
    for index, group in enumerate(groups):
        sequences = group.max_batch_size or settings.engine.max_num_seqs
        engine = replace(settings.engine, role=role, max_num_seqs=sequences)
        if replicas := group.replicas or min(index, 1):
            name = group.name or f"{role}-worker"
            yield ReplicaGroup("worker", name, replicas, replace(settings, engine=engine))
