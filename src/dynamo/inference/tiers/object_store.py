"""`ObjectStore`: objects in an S3 bucket, by the library obstore."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from dynamo.core.errors import ConfigError
from dynamo.inference.tiers.codecs import CorruptBlock
from dynamo.models.downloads.bucket import find_access_problem, first_line, open_bucket

T = TypeVar("T")
TIMEOUT_S: Final = 1.0
"""A read that takes longer counts as failed and is tried once more."""
RETRY_S: Final = 2.0
WRITE_TIMEOUT_S: Final = 10.0
"""The same for writes, for which nobody waits."""
PAGE_KEYS: Final = 1000
"""Keys that are listed between two turns of the event loop."""
URL_PARAM: Final = "cache.remote_url"


class ListedObject(NamedTuple):
    """An object as a listing shows it: `changed_s` is the Unix time of its last change."""

    key: str
    changed_s: float
    size: int


class ObjectMissing(Exception):
    """The object is not in the bucket."""


class ObjectExists(Exception):
    """Another process has stored the object."""


class StoreFailure(Exception):
    """The store did not do what it was asked for."""


class ObjectStore:
    """The objects under a prefix of a bucket."""

    def __init__(self, url: str) -> None:
        """Does no I/O. Raises `ConfigError` for a URL that is not s3://BUCKET/PREFIX."""
        self.url = url
        self.bucket = urlsplit(url).netloc
        self._store, self._writes = (
            open_bucket(
                url,
                timeout_s=timeout_s,
                connect_s=TIMEOUT_S,
                retry_s=RETRY_S,
                param=URL_PARAM,
                without=", or omit --kv-remote-url",
            )
            for timeout_s in (TIMEOUT_S, WRITE_TIMEOUT_S)
        )

    async def check(self) -> None:
        """Ask for an object that does not exist. Raises `ConfigError` if bucket or credentials are
        wrong, and `StoreFailure` if the store does not answer."""
        try:
            await self._store.get_async("dynamo-check")
        except Exception as error:
            if problem := find_access_problem(self.url, error):
                what, hint = problem
                raise ConfigError(f"{self.url}: {what}", hint=hint, param=URL_PARAM) from error
            if not isinstance(error, FileNotFoundError):
                raise StoreFailure(first_line(error)) from error

    async def get(self, key: str, max_bytes: int) -> memoryview:
        """Return an object. Raises `ObjectMissing`, `StoreFailure`, or `CorruptBlock` if it has
        more than `max_bytes`."""
        result = await _wait(self._store.get_async(key))
        size = result.meta["size"]
        if size > max_bytes:
            raise CorruptBlock(f"the object has {size} bytes")
        return memoryview(await _wait(result.bytes_async()))

    async def get_start(self, key: str, size: int) -> memoryview:
        """Return the first `size` bytes of an object, or fewer if it is shorter. Raises
        `ObjectMissing` or `StoreFailure`."""
        return memoryview(await _wait(self._store.get_range_async(key, start=0, end=size)))

    async def create(self, key: str, data: bytes) -> bool:
        """Store an object. False: there is one already, which stays. Raises `StoreFailure`."""
        try:
            await _wait(self._writes.put_async(key, data, mode="create", use_multipart=False))
        except ObjectExists:
            return False
        return True

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Missing ones do not matter. Raises `StoreFailure`."""
        with suppress(ObjectMissing):
            await _wait(self._writes.delete_async(list(keys)))

    async def list_objects(self, prefix: str) -> AsyncIterator[list[ListedObject]]:
        """Yield the objects below `prefix` in pages, without empty ones, of which no range can be
        read. Raises `StoreFailure`."""
        pages = self._store.list(prefix, chunk_size=PAGE_KEYS)
        while (page := await _wait(anext(pages, None))) is not None:
            yield [
                ListedObject(item["path"], item["last_modified"].timestamp(), item["size"])
                for item in page
                if item["size"]
            ]


async def _wait(operation: Awaitable[T]) -> T:
    from obstore.exceptions import AlreadyExistsError

    try:
        return await operation
    except FileNotFoundError as error:
        raise ObjectMissing(first_line(error)) from None
    except AlreadyExistsError:
        raise ObjectExists from None
    except Exception as error:
        raise StoreFailure(first_line(error)) from error
