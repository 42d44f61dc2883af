"""Models in an S3 bucket, `s3://BUCKET/FOLDER` or `s3://BUCKET/FILE.gguf`: fetched into the cache.

Credentials and the address come from the environment, by the names that all clients of S3 use:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL and others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from dynamo.core.errors import ConfigError, ModelUnavailable
from dynamo.core.installation import install_command
from dynamo.models.downloads.hub import folder_patterns
from dynamo.models.file_cache import ProgressCallback, cache_dir, file_lock, ignore_progress

if TYPE_CHECKING:
    from obstore.store import S3Store

SCHEME: Final = "s3://"
READ_BYTES: Final = 16 << 20
"""Bytes of one read: what is lost when a download ends."""
READ_TIMEOUT_S: Final = 60.0
CONNECT_TIMEOUT_S: Final = 5.0
KEY_HINT: Final = "give them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_METADATA_PATH: Final = "/latest/api/token"
"""Where instances of a cloud ask for credentials if the environment has none."""


class BucketFile(msgspec.Struct, frozen=True):
    """An object of a model, and its place on this machine."""

    key: str
    size_bytes: int
    changed_s: int
    path: Path

    @property
    def is_here(self) -> bool:
        """Whether the file is complete and as new as the object."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        return (stat.st_size, int(stat.st_mtime)) == (self.size_bytes, self.changed_s)


def open_bucket(
    url: str,
    *,
    timeout_s: float,
    connect_s: float,
    retry_s: float,
    param: str = "",
    without: str = "",
) -> S3Store:
    """Return the objects below a URL, without I/O. `without`: the way to do without the library.

    Raises `ConfigError`, which names the setting `param`, for a URL that is not s3://BUCKET/PREFIX.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        hint = "write s3://BUCKET/PREFIX"
        raise ConfigError(f"{url!r} is not an object store", hint=hint, param=param)
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
    for text, what in (
        (parts.netloc, "the URL of the object store"),
        (endpoint, "the address of the object store (AWS_ENDPOINT_URL)"),
    ):
        if "@" in text:
            raise ConfigError(f"{what} has a user or a password", hint=KEY_HINT, param=param)
    try:
        from obstore.store import S3Store
    except ImportError as error:
        what, hint = "an object store needs the package obstore", install_command("s3") + without
        raise ConfigError(what, hint=hint, param=param) from error
    options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if "AWS_REGION" not in os.environ and "AWS_DEFAULT_REGION" not in os.environ:
        options["region"] = "us-east-1"
    try:
        return S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options={
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=connect_s),
                "allow_http": endpoint.startswith("http://"),
            },
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=retry_s)},
            **options,
        )
    except Exception as error:
        raise ConfigError(
            f"{url} cannot be used: {first_line(error)}",
            hint="check the bucket's name and the variables AWS_* of the environment",
            param=param,
        ) from error


def find_access_problem(url: str, error: BaseException) -> tuple[str, str] | None:
    """Return what is wrong with bucket or credentials and what to do, or None for an error of
    another kind."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    bucket, text = urlsplit(url).netloc, str(error)
    if isinstance(error, FileNotFoundError) and "NoSuchBucket" in text:
        return f"the bucket {bucket} does not exist", "create it, or correct the name"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        hint = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the rights of this key"
        return f"access to the bucket {bucket} is denied", hint
    if _METADATA_PATH in text:
        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return "there are no credentials for the object store", hint
    if "redirect" in text.lower():
        return f"the bucket {bucket} is in another region", "set AWS_REGION"
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error of the library."""
    return str(error).partition("\n")[0].strip()


def place_of(url: str) -> Path:
    """Return the place of a model in the cache, fetched or not. Raises `ModelUnavailable`."""
    parts = [part for part in url.removeprefix(SCHEME).split("/") if part]
    if not parts or {".", ".."} & set(parts):
        raise ModelUnavailable(f"{url} names no model", hint="write s3://BUCKET/FOLDER")
    return cache_dir("models", "s3").joinpath(*parts)


def cached_files() -> Iterator[tuple[str, Path]]:
    """Yield the fetched files of buckets, each with the URL of its model."""
    root = cache_dir("models", "s3")
    for path in sorted(root.rglob("[!.]*.*")):
        if path.is_file():
            model = path if path.suffix == ".gguf" else path.parent
            yield SCHEME + model.relative_to(root).as_posix(), path


def planned_files(url: str) -> list[BucketFile]:
    """Return the objects of a model: the one of a GGUF URL, else weights, configuration and at last
    the tokenizer of a folder. Raises `ModelUnavailable`."""
    place = place_of(url)
    folder, patterns = place, folder_patterns(with_weights=True)
    if place.suffix == ".gguf":
        folder, patterns = place.parent, [place.name]
    with _explained_errors(url):
        objects = [item for page in _open(url).list() for item in page]
    files = [
        BucketFile(key, item["size"], int(item["last_modified"].timestamp()), folder / key)
        for item in objects
        if "/" not in (key := item["path"]) and any(fnmatch(key, pattern) for pattern in patterns)
    ]
    if not any(file.path.suffix in {".gguf", ".safetensors"} for file in files):
        raise ModelUnavailable(
            f"there is no model at {url}",
            hint="name a folder with weights in safetensors, or a file that ends in .gguf",
        )
    return sorted(files, key=lambda file: file.path.name == "tokenizer.json")


def fetch(url: str, files: list[BucketFile], progress: ProgressCallback = ignore_progress) -> Path:
    """Fetch what is missing of a model's files, and return the folder or GGUF file. A download that
    was interrupted is resumed. Raises `ModelUnavailable`."""
    store = _open(url)
    total = sum(file.size_bytes for file in files)
    done = 0
    for file in files:
        with _explained_errors(url):
            file.path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(file.path.with_name(f".{file.path.name}.lock")):
                for here in _fetch_file(store, file):
                    progress(f"fetching {url}", done + here, total)
        done += file.size_bytes
    return place_of(url)


def _fetch_file(store: S3Store, file: BucketFile) -> Iterator[int]:
    """Append what is missing to the part of this version of the object, then rename it. Yields
    the bytes that are here."""
    if file.is_here:
        return
    part = file.path.with_name(f".{file.path.name}.{file.changed_s}.{file.size_bytes}.part")
    with part.open("ab") as target:
        while (start := target.tell()) < file.size_bytes:
            yield start
            end = min(start + READ_BYTES, file.size_bytes)
            target.write(memoryview(store.get_range(file.key, start=start, end=end)))
    os.utime(part, (file.changed_s, file.changed_s))
    part.rename(file.path)
    yield file.size_bytes


def _open(url: str) -> S3Store:
    """Open the folder of a model's URL."""
    folder = url.rpartition("/")[0] if url.endswith(".gguf") else url
    try:
        return open_bucket(
            folder, timeout_s=READ_TIMEOUT_S, connect_s=CONNECT_TIMEOUT_S, retry_s=READ_TIMEOUT_S
        )
    except ConfigError as error:
        raise ModelUnavailable(error.message, hint=error.hint) from error


@contextmanager
def _explained_errors(url: str) -> Iterator[None]:
    """Raise the errors of the library and of the disk as `ModelUnavailable`."""
    try:
        yield
    except ModelUnavailable:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise ModelUnavailable(f"{url} cannot be stored: {error.strerror}") from error
        again = "check the network, and repeat the command: it resumes"
        what, hint = find_access_problem(url, error) or (first_line(error), again)
        raise ModelUnavailable(f"{url} cannot be fetched: {what}", hint=hint) from error
