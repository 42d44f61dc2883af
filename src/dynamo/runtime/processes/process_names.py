"""Names of processes: those of replicas are a kind and a number."""

from __future__ import annotations

from dynamo.core.errors import ConfigError

MAX_REPLICAS = 1024
"""A larger number on one host is taken for a typing error."""


def kind_of_process(name: str) -> str:
    """The common name of replicas: `worker` for `worker-2`."""
    head, _, tail = name.rpartition("-")
    return head if head and tail.isdecimal() else name


def check_replicas(kind: str, count: int) -> None:
    """Check a number of replicas. Raises `ConfigError`."""
    if not 0 <= count <= MAX_REPLICAS:
        raise ConfigError(f"cannot run {count} {kind} processes: a host runs 0 to {MAX_REPLICAS}")
