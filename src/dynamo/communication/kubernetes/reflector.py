"""Objects of a kind that are followed: list, watch, resume, list again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final, Generic, NoReturn, TypeVar
from urllib.parse import urlencode

import msgspec

from dynamo.communication.kubernetes.link import ApiServerError, KubernetesLink
from dynamo.core.clock import Backoff
from dynamo.core.errors import DECODE_ERRORS, PlaneUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

PAGE_OBJECTS: Final = 500
WATCH_S: Final = 300.0
"""The server ends a watch after so many seconds, up to half of them more."""
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 1.0
STABLE_S: Final = 5.0
"""A watch that lived so long was a success: the next delay is the first one again."""
GONE: Final = 410


class OwnerReference(msgspec.Struct, frozen=True, rename="camel"):
    """The owner of an object."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """The metadata of an object that every follower needs."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = "0"
    owner_references: tuple[OwnerReference, ...] = ()


class ObjectChange(msgspec.Struct, Generic[T], frozen=True):
    """An object that was added, changed or deleted. `key` is NAMESPACE/NAME. `value` is None for a
    deleted one, and `before` for a new one."""

    key: str
    value: T | None
    before: T | None


Decode = Callable[[Metadata, bytes], T]
"""Turns an object's metadata and its JSON into what the follower keeps of it."""
OnChanges = Callable[[Sequence[ObjectChange[T]], bool], None]
"""Takes changes. True: they are the differences to what the server lists after an outage, or the
first list."""


class _Identified(msgspec.Struct, frozen=True):
    metadata: Metadata


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = "0"
    continue_: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: list[msgspec.Raw] = []


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Failure(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


_identify = msgspec.json.Decoder(_Identified).decode
_page = msgspec.json.Decoder(_Page).decode
_event = msgspec.json.Decoder(_Event).decode
_failure = msgspec.json.Decoder(_Failure).decode


class Reflector(Generic[T]):
    """Follows the objects at a path, by one watch stream, until `run` is cancelled.

    `path` is that of a collection, such as `/apis/apps/v1/namespaces/default/deployments`, and
    `selector` selects labels. `decode(metadata, json)` makes the values; an object that it cannot
    decode keeps its last value. `objects` has the values by NAMESPACE/NAME, and `on_changes` is
    called after each change of it. `listed` is set once the objects were read for the first time.
    `connection_error` says why the server cannot be reached now, or is "".

    A watch that ends is resumed from its last resource version. After a failure, a 410, or if the
    server is at an older version (a restored backup), the objects are listed again, and what
    differs is a change with `after_outage`.
    """

    def __init__(
        self,
        link: KubernetesLink,
        path: str,
        decode: Decode[T],
        on_changes: OnChanges[T],
        *,
        selector: str = "",
        rng: Random | None = None,
    ) -> None:
        self._link = link
        self.path = path
        self._decode = decode
        self._on_changes = on_changes
        self._query = {"labelSelector": selector} if selector else {}
        self._rng = rng or Random()
        self._versions: dict[str, int] = {}
        self._listed_version = self._version = 0
        self._deleted: dict[str, int] = {}
        self._lists_in_progress = 0
        self._pending: list[ObjectChange[T]] = []
        self.objects: dict[str, T] = {}
        self.listed = asyncio.Event()
        self.connection_error = "not connected yet"

    async def run(self) -> NoReturn:
        """Follow the objects until cancelled."""
        backoff = Backoff(RETRY_S, MAX_RETRY_S, 0.5)
        must_list = True
        while True:
            began_s = time.monotonic()
            delay_s = 0.0
            try:
                if must_list:
                    await self._list_again()
                    must_list = False
                seconds = WATCH_S * (1 + 0.5 * self._rng.random())
                await self._watch(seconds)
                if time.monotonic() < began_s + seconds - 1:  # cut, perhaps by the server's end
                    must_list = await self._is_older()
                    delay_s = backoff.next_s(self._rng)
            except PlaneUnavailable as error:
                must_list = True
                delay_s = max(backoff.next_s(self._rng), error.retry_after_s or 0.0)
                if not (isinstance(error, ApiServerError) and error.status == GONE):
                    self._report(error)
            if time.monotonic() > began_s + STABLE_S:
                backoff.reset()
            await asyncio.sleep(delay_s)

    async def refresh(self) -> None:
        """Read the objects as they are now. Raises `PlaneUnavailable`.

        Changes that the watch has not brought yet are applied, and skipped when it brings them.
        """
        if not self.listed.is_set() or self.connection_error:
            await self._list_again()
            return
        self._lists_in_progress += 1
        try:
            version, items = await self._list()
            if version >= self._version:  # else the watch knows more
                self._apply_list(version, items, replaces=False)
        finally:
            self._lists_in_progress -= 1
            if not self._lists_in_progress:
                self._deleted.clear()
        self._publish(after_outage=False)

    async def _list_again(self) -> None:
        """Read the objects after an outage, or for the first time."""
        version, items = await self._list()
        self._apply_list(version, items, replaces=True)
        self._version = version
        self.connection_error = ""
        self._link.outage_log.end()
        self._publish(after_outage=True)
        self.listed.set()

    async def _is_older(self) -> bool:
        """Return whether the server is at an older version than this process has seen."""
        page = await self._read_page({"limit": "1"})
        return int(page.metadata.resource_version) < self._version

    async def _list(self) -> tuple[int, list[msgspec.Raw]]:
        """Return the version of a list and its items, read in pages."""
        query = {"limit": str(PAGE_OBJECTS)}
        items: list[msgspec.Raw] = []
        while True:
            page = await self._read_page(query)
            items += page.items
            if not page.metadata.continue_:
                return int(page.metadata.resource_version), items
            query["continue"] = page.metadata.continue_

    async def _read_page(self, query: Mapping[str, str]) -> _Page:
        path = f"{self.path}?{urlencode({**self._query, **query})}"
        try:
            return _page(await self._link.request("GET", path))
        except DECODE_ERRORS as error:
            raise PlaneUnavailable(f"Kubernetes sent a list that is none: {error}") from None

    def _apply_list(self, version: int, items: Sequence[msgspec.Raw], *, replaces: bool) -> None:
        """Apply the differences to a list. `replaces`: whatever their versions are, since
        a restored server gives versions a second time."""
        missing = self.objects.keys() | self._versions.keys()
        for item in items:
            metadata = _identify(item).metadata
            key = _key(metadata)
            missing.discard(key)
            listed = int(metadata.resource_version)
            known = max(self._versions.get(key, -1), self._deleted.get(key, -1))
            if not replaces and known >= listed:
                continue
            self._put(key, listed, metadata, item)
        for key in missing:
            if replaces or self._versions.get(key, 0) <= version:
                self._remove(key)
        self._listed_version = version

    async def _watch(self, seconds: float) -> None:
        """Apply events until the stream ends. Raises `ApiServerError` 410."""
        query = self._query | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(self._version),
            "timeoutSeconds": str(int(seconds)),
        }
        try:
            await self._link.stream(f"{self.path}?{urlencode(query)}", self._on_line, seconds + 10)
        except ApiServerError:
            raise
        except PlaneUnavailable as error:  # cut: the next request shows whether the server is away
            log.debug("watch cut", extra={"fields": {"path": self.path, "error": error.message}})

    def _on_line(self, line: bytes) -> None:
        """Apply an event. Raises `PlaneUnavailable` for an error of the server."""
        if not line:
            return
        try:
            event = _event(line)
            if event.type == "ERROR":
                failure = _failure(event.object)
                text = f"Kubernetes ended the watch of {self.path}: {failure.message}"
                raise ApiServerError(text, failure.code, {}, None)
            metadata = _identify(event.object).metadata
        except DECODE_ERRORS as error:
            raise PlaneUnavailable(f"Kubernetes sent an event that is none: {error}") from None
        version = int(metadata.resource_version)
        self._version = max(self._version, version)
        if event.type == "BOOKMARK":
            return
        key = _key(metadata)
        if version <= max(self._listed_version, self._versions.get(key, -1)):
            return
        if event.type == "DELETED":
            self._remove(key)
            if self._lists_in_progress:
                self._deleted[key] = version
        else:
            self._put(key, version, metadata, event.object)
        self._publish(after_outage=False)

    def _put(self, key: str, version: int, metadata: Metadata, item: msgspec.Raw) -> None:
        self._versions[key] = version
        try:
            value = self._decode(metadata, bytes(item))
        except DECODE_ERRORS as error:
            fields = {"object": f"{self.path} {key}", "error": str(error)}
            log.warning("invalid object; its last value stays", extra={"fields": fields})
            return
        before = self.objects.get(key)
        self.objects[key] = value
        if value != before:
            self._pending.append(ObjectChange(key, value, before))

    def _remove(self, key: str) -> None:
        self._versions.pop(key, None)
        if (before := self.objects.pop(key, None)) is not None:
            self._pending.append(ObjectChange(key, None, before))

    def _publish(self, *, after_outage: bool) -> None:
        pending, self._pending = self._pending, []
        if pending or after_outage:
            self._on_changes(pending, after_outage)

    def _report(self, error: PlaneUnavailable) -> None:
        self.connection_error = error.message
        self._link.outage_log.report(error.message)


def _key(metadata: Metadata) -> str:
    return f"{metadata.namespace}/{metadata.name}"
