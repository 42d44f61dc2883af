"""`ObjectStore`: objects in an S3 bucket, by the library obstore.

Credentials and the address come from the environment, by the names that all clients of S3 use:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL and others.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from dynamo.core.errors import ConfigError
from dynamo.core.installation import install_command
from dynamo.inference.tiers.codecs import CorruptBlock

if TYPE_CHECKING:
    from obstore.store import S3Store

T = TypeVar("T")
TIMEOUT_S: Final = 1.0
"""A read that takes longer counts as failed and is tried once more."""
RETRY_S: Final = 2.0
WRITE_TIMEOUT_S: Final = 10.0
"""The same for writes, for which nobody waits."""
PAGE_KEYS: Final = 1000
"""Keys that are listed between two turns of the event loop."""
URL_PARAM: Final = "cache.remote_url"
KEY_HINT: Final = "give them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_METADATA_PATH: Final = "/latest/api/token"
"""Where instances of a cloud ask for credentials if the environment has none."""
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


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
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc:
            raise ConfigError(
                f"{url!r} is not an object store",
                hint="write s3://BUCKET/PREFIX",
                param=URL_PARAM,
            )
        if "@" in parts.netloc:
            raise ConfigError(
                "the URL of the object store has a user or a password",
                hint=KEY_HINT,
                param=URL_PARAM,
            )
        self.url = url
        self.bucket = parts.netloc
        self._store = self._open(parts.path.strip("/"), TIMEOUT_S)
        self._writes = self._open(parts.path.strip("/"), WRITE_TIMEOUT_S)

    def _open(self, prefix: str, timeout_s: float) -> S3Store:
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise ConfigError(
                "an object store needs the package obstore",
                hint=f"{install_command('s3')}, or omit --kv-remote-url",
                param=URL_PARAM,
            ) from error
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
        if "@" in endpoint:
            raise ConfigError(
                "the address of the object store (AWS_ENDPOINT_URL) has a user or a password",
                hint=KEY_HINT,
                param=URL_PARAM,
            )
        options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        if "AWS_REGION" not in os.environ and "AWS_DEFAULT_REGION" not in os.environ:
            options["region"] = "us-east-1"
        try:
            return S3Store(
                self.bucket,
                prefix=prefix or None,
                client_options={
                    "timeout": timedelta(seconds=timeout_s),
                    "connect_timeout": timedelta(seconds=TIMEOUT_S),
                    "allow_http": endpoint.startswith("http://"),
                },
                retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=RETRY_S)},
                **options,
            )
        except Exception as error:
            raise ConfigError(
                f"{self.url} cannot be used: {_first_line(error)}",
                hint="check the bucket's name and the variables AWS_* of the environment",
                param=URL_PARAM,
            ) from error

    async def check(self) -> None:
        """Ask for an object that does not exist. Raises `ConfigError` if bucket or credentials are
        wrong, and `StoreFailure` if the store does not answer."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        try:
            await self._store.get_async("dynamo-check")
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise self._error(
                    f"the bucket {self.bucket} does not exist", "create it, or correct the name"
                ) from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise self._error(
                f"access to the bucket {self.bucket} is denied",
                "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the rights of this key",
            ) from error
        except Exception as error:
            if _METADATA_PATH in str(error):
                raise self._error(
                    "there are no credentials for the object store",
                    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                ) from error
            if "redirect" in str(error).lower():
                raise self._error(
                    f"the bucket {self.bucket} is in another region", "set AWS_REGION"
                ) from error
            raise StoreFailure(_first_line(error)) from error

    def _error(self, what: str, hint: str) -> ConfigError:
        return ConfigError(f"{self.url}: {what}", hint=hint, param=URL_PARAM)

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
        raise ObjectMissing(_first_line(error)) from None
    except AlreadyExistsError:
        raise ObjectExists from None
    except Exception as error:
        raise StoreFailure(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip()
