"""Buckets as sources of models: `s3://BUCKET/FOLDER` or `s3://BUCKET/FILE.gguf`, `gs://`, `az://`.

Credentials and addresses come from the environment, by the names that all clients use: of S3
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL and others, of the others
GOOGLE_SERVICE_ACCOUNT, GOOGLE_BASE_URL, AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ENDPOINT.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from dynamo.core.errors import ConfigError, ModelUnavailable
from dynamo.core.installation import install_command
from dynamo.models.downloads.sources import (
    ModelSpec,
    SourceUnavailable,
    changed_error,
    choose_files,
    source_manifest,
)
from dynamo.models.shelf.manifest import Manifest, ManifestFile

if TYPE_CHECKING:
    from obstore.store import S3Store

SCHEME: Final = "s3://"
READ_BYTES: Final = 1 << 20
READ_TIMEOUT_S: Final = 60.0
CONNECT_TIMEOUT_S: Final = 5.0
KEY_HINT: Final = "give them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_OTHER_ENDPOINTS: Final = ("GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT, the path of the key file of a service account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_NO_CREDENTIALS: Final = (
    "/latest/api/token",
    "/computeMetadata/",
    "/metadata/identity",
    "Account must be specified",
)
"""Addresses at which instances of a cloud ask for credentials if the environment has none."""


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

    parts, text = urlsplit(url), str(error)
    bucket, credentials = parts.netloc, _CREDENTIALS[parts.scheme]
    if any(code in text for code in ("NoSuchBucket", "ContainerNotFound")):
        return f"the bucket {bucket} does not exist", "create it, or correct the name"
    if any(mark in text for mark in _NO_CREDENTIALS):
        return "there are no credentials for the object store", f"set {credentials}"
    denied = isinstance(error, PermissionDeniedError | UnauthenticatedError)
    if denied or "403 Forbidden" in text or "401 Unauthorized" in text:
        hint = f"check {credentials}, and the rights of this key"
        return f"access to the bucket {bucket} is denied", hint
    if "redirect" in text.lower():
        return f"the bucket {bucket} is in another region", "set AWS_REGION"
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error of the library."""
    return str(error).partition("\n")[0].strip()


class BucketSource:
    """A folder of a bucket, or a GGUF file there: `s3://`, `gs://` or `az://BUCKET/FOLDER`."""

    kind = "bucket"

    def __init__(self, spec: ModelSpec, *, with_weights: bool) -> None:
        self._spec = spec
        self._with_weights = with_weights
        parts = [part for part in spec.name.partition("://")[2].split("/") if part]
        if len(parts) < 1 or {".", ".."} & set(parts):
            raise ModelUnavailable(f"{spec.name} names no model", hint="write s3://BUCKET/FOLDER")
        self._tags: dict[str, str | None] = {}
        with self._explained_errors():
            self._store = self._open()

    def resolve(self, known: list[Manifest]) -> Manifest:
        del known
        with self._explained_errors():
            objects = [item for page in self._store.list() for item in page]
        entries = {item["path"]: item for item in objects if "/" not in item["path"]}
        names = choose_files(self._spec, list(entries), with_weights=self._with_weights)
        self._tags = {name: entries[name].get("e_tag") for name in names}
        versions = [
            (
                name,
                entries[name]["size"],
                self._tags[name] or entries[name]["last_modified"].timestamp(),
            )
            for name in names
        ]
        return source_manifest(self._spec, versions, with_weights=self._with_weights)

    def read(
        self, manifest: Manifest, file: ManifestFile, span: range, sink: Callable[[bytes], object]
    ) -> None:
        from obstore.exceptions import PreconditionError

        options: dict[str, Any] = {"range": (span.start, span.stop)}
        if tag := self._tags.get(file.path):
            options["if_match"] = tag
        try:
            with self._explained_errors():
                for chunk in self._store.get(file.path, options=options).stream(READ_BYTES):
                    sink(bytes(chunk))
        except PreconditionError:
            raise changed_error(manifest) from None

    def _open(self) -> Any:
        """Open the folder of the model's URL."""
        url = self._spec.name
        folder = url.rpartition("/")[0] if url.endswith(".gguf") else url
        if url.startswith(SCHEME):
            return open_bucket(
                folder,
                timeout_s=READ_TIMEOUT_S,
                connect_s=CONNECT_TIMEOUT_S,
                retry_s=READ_TIMEOUT_S,
            )
        try:
            from obstore.store import from_url
        except ImportError as error:
            what, hint = "an object store needs the package obstore", install_command("s3")
            raise ConfigError(what, hint=hint) from error
        endpoints = (os.environ.get(name, "") for name in _OTHER_ENDPOINTS)
        return from_url(
            folder,
            client_options={
                "timeout": timedelta(seconds=READ_TIMEOUT_S),
                "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
            },
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=READ_TIMEOUT_S)},
        )

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Raise the errors of the library as `ModelUnavailable`."""
        url = self._spec.name
        try:
            yield
        except ModelUnavailable:
            raise
        except ConfigError as error:
            raise ModelUnavailable(error.message, hint=error.hint) from error
        except Exception as error:
            if type(error).__name__ == "PreconditionError":
                raise
            again = "check the network, and repeat the command: it resumes"
            problem = find_access_problem(url, error)
            what, hint = problem or (first_line(error), again)
            kind = ModelUnavailable if problem else SourceUnavailable
            raise kind(f"{url} cannot be fetched: {what}", hint=hint) from error
