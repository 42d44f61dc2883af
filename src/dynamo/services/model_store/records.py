"""Records of the model store in discovery: what each process has of a model, and which of them asks
its source."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import quote, unquote

import msgspec
from msgspec.structs import replace

from dynamo.communication.directory import RecordChange, follow_records
from dynamo.core.errors import DECODE_ERRORS, ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.models.downloads.sources import ModelSpec
from dynamo.runtime.distributed import DistributedRuntime

RECORD_INTERVAL_S = 1.0
CLAIM_POLL_S = 0.02
SMALL_KEY = "?small"
"""The end of the key of a model without weights."""


class StoreRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a model in a process. A model without a record is absent.

    `asks_source`: this process alone asks the source; `claims`: it wants to. `reason` and `again_s`
    (Unix time) are those of a failure or of a wait. A process that fetches and has a reason cannot
    ask the source.
    """

    state: Literal["fetching", "ready", "failed"]
    commit: str = ""
    asks_source: bool = False
    claims: bool = False
    is_store: bool = False
    done_bytes: int = 0
    total_bytes: int = 0
    reason: str = ""
    again_s: float = 0.0

    @property
    def may_get_pieces(self) -> bool:
        """Whether the process fetches, and asks the source or may do so."""
        return self.state == "fetching" and (self.asks_source or not self.reason)


def store_prefix(namespace: str, key: str = "") -> str:
    """Return the key prefix of the records of a model, or of all models. The instance follows."""
    return f"/{namespace}/store/" + (f"{quote(key, safe='')}/" if key else "")


def model_key(spec: ModelSpec, *, with_weights: bool = True) -> str:
    """Return the name of a model among peers: with its revision."""
    key = f"{spec.name}@{spec.revision}"
    return key if with_weights else f"{key}{SMALL_KEY}"


def parse_key(text: str) -> tuple[str, str]:
    """Return the model and the instance of a key without its prefix."""
    key, _, instance = text.partition("/")
    return unquote(key), instance


def decode_records(values: Mapping[str, bytes], prefix: str) -> dict[str, StoreRecord]:
    """Return the records of keys without their prefix. A record of another version is left out."""
    records = {}
    for key, value in values.items():
        with suppress(*DECODE_ERRORS):
            records[key.removeprefix(prefix)] = msgspec.json.decode(value, type=StoreRecord)
    return records


class PeerRecords:
    """The records of one model, as a process that fetches it sees them, and its `own` one.
    `changed` is set with each change."""

    def __init__(self, runtime: DistributedRuntime, key: str, own: StoreRecord) -> None:
        self.own = own
        self.others: dict[str, StoreRecord] = {}
        self.known = asyncio.Event()
        self.changed = asyncio.Event()
        self._runtime = runtime
        self._prefix = store_prefix(runtime.settings.runtime.namespace, key)
        self._announced_at = -RECORD_INTERVAL_S

    async def follow(self) -> None:
        """Follow the records of others until cancelled."""
        await follow_records(
            self._runtime.discovery, self._prefix, self._apply, self._runtime.clock
        )

    async def announce(self, **changes: Any) -> None:
        """Change fields of the own record, at once, or without changes its progress."""
        if changes:
            self.own = replace(self.own, **changes)
        await self._runtime.discovery.put(
            self._prefix + self._runtime.instance_id, msgspec.json.encode(self.own)
        )
        self._announced_at = self._runtime.clock.now()

    async def announce_progress(self, done_bytes: int) -> None:
        """Announce the progress once in a while."""
        if self._runtime.clock.now() - self._announced_at >= RECORD_INTERVAL_S:
            await self.announce(done_bytes=done_bytes)

    async def withdraw(self) -> None:
        """Delete the own record."""
        await self._runtime.discovery.delete(self._prefix + self._runtime.instance_id)

    async def elect(self) -> bool:
        """Return whether this process alone asks the source. A process that wants to claims it,
        reads all records, and waits for other claims, of which the lowest wins."""
        own = self._rank(self._runtime.instance_id, self.own)
        stores = any(record.is_store and record.may_get_pieces for record in self.others.values())
        if self.own.reason and not self.own.asks_source:
            return False
        if stores and not self.own.is_store:
            if self.own.asks_source:
                await self.announce(asks_source=False)
            return False
        if self.own.asks_source:
            return True
        if any(map(self._excludes_others, self.others.values())):
            return False
        await self.announce(claims=True)
        while True:
            others = await self._read_others()
            if any(
                self._excludes_others(record)
                or (record.claims and self._rank(instance, record) < own)
                for instance, record in others.items()
            ):
                await self.announce(claims=False)
                return False
            if not any(record.claims for record in others.values()):
                await self.announce(claims=False, asks_source=True)
                return True
            await self._runtime.clock.sleep(CLAIM_POLL_S)

    def _excludes_others(self, record: StoreRecord) -> bool:
        """Whether a process asks the source, or has failed to do so lately."""
        has_failed = record.state == "failed" and record.again_s > self._runtime.clock.wall()
        return record.asks_source or has_failed

    async def _read_others(self) -> dict[str, StoreRecord]:
        """Return the records of others as they are now."""
        records = decode_records(await self._runtime.discovery.get(self._prefix), self._prefix)
        records.pop(self._runtime.instance_id, None)
        return records

    @staticmethod
    def _rank(instance: str, record: StoreRecord) -> tuple[bool, str]:
        """Return the order in which processes ask the source."""
        return not record.is_store, instance

    def check_hope(self, left_out: Sequence[str], error: ModelUnavailable) -> None:
        """Raise the failure of who asked the source, or `error` if no other process has pieces or
        may get them. `left_out`: processes of which nothing is read."""
        others = [each for peer, each in self.others.items() if peer not in left_out]
        if any(each.state == "ready" or each.asks_source for each in others):
            return
        for record in others:
            if record.state == "failed" and record.again_s > self._runtime.clock.wall():
                raise ModelUnavailable(record.reason, hint="it is tried again by itself")
        may_ask = self.own.asks_source or not self.own.reason
        if not may_ask and not any(each.may_get_pieces for each in others):
            raise error

    def _apply(self, batch: Sequence[RecordChange], replaces: bool) -> None:
        if replaces:
            self.others.clear()
        for change in batch:
            self.others.pop(change.key.removeprefix(self._prefix), None)
        values = {change.key: change.value for change in batch if change.value is not None}
        self.others |= decode_records(values, self._prefix)
        self.others.pop(self._runtime.instance_id, None)
        self.known.set()
        self.changed.set()


async def read_records(settings: Settings) -> list[tuple[str, str, StoreRecord]]:
    """Return what the processes of a namespace have: model, instance and record. Raises
    `PlaneUnavailable`."""
    prefix = store_prefix(settings.runtime.namespace)
    async with await DistributedRuntime.create(settings, role="client") as runtime:
        values = await runtime.discovery.get(prefix)
    records = sorted(decode_records(values, prefix).items())
    return [(*parse_key(name), record) for name, record in records]
