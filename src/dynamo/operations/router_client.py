"""HTTP client of a deployment's routing API (/router)."""

from __future__ import annotations

import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

import msgspec

from dynamo.core.errors import DynamoError, InvalidRequest, ModelNotReady, NotFound, Unauthorized

HTTP_TIMEOUT_S = 10.0
API_KEY_HINT = "--api-key KEY, or $DYNAMO_API_KEY"
ERROR_BY_STATUS: dict[int, type[DynamoError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    404: NotFound,
}


class RouterErrorDetail(msgspec.Struct, frozen=True):
    """The `error` object of an error response."""

    message: str = ""
    hint: str | None = None


class RouterErrorBody(msgspec.Struct, frozen=True):
    """The body of an error response."""

    error: RouterErrorDetail = RouterErrorDetail()


class RouterClient:
    """Client of the HTTP port of a frontend or a router process. Every method blocks and raises
    `DynamoError` if the server cannot be reached or answers with an error."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key = api_key

    def explain(self, request_id: str = "") -> list[dict[str, Any]]:
        """Fetch the decisions for a request, or the last ones. Raises `NotFound`."""
        path = f"/router/explain/{quote(request_id)}" if request_id else "/router/explain"
        return self._get_json(path, "decisions")["decisions"]  # type: ignore[no-any-return]

    def report(self, seconds: float | None = None) -> dict[str, Any]:
        """Fetch a `PerformanceReport` of the last `seconds`."""
        query = "" if seconds is None else f"?seconds={seconds:g}"
        return self._get_json(f"/router/report{query}", "aggregated_metrics")

    def timeline(self, seconds: float | None = None) -> dict[str, Any]:
        """Fetch the series of every worker of the last `seconds`, at most 15 minutes."""
        query = "" if seconds is None else f"?seconds={seconds:g}"
        return self._get_json(f"/router/timeline{query}", "workers")

    def _get_json(self, path: str, part: str) -> dict[str, Any]:
        """Fetch the JSON object at `path`, which must have the key `part`."""
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        request = urllib.request.Request(self._url + path, headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:  # noqa: S310
                body = msgspec.json.decode(response.read(), type=dict[str, Any])
        except urllib.error.HTTPError as error:
            with error:
                raise _parse_error(error.code, error.read()) from None
        except (msgspec.DecodeError, UnicodeDecodeError, HTTPException) as error:
            raise DynamoError(f"{self._url}{path} is not a response of dynamo: {error}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ModelNotReady(
                f"cannot reach {self._url}: {getattr(reason, 'strerror', None) or reason}",
                hint="`dynamo ps` lists what runs; --url names the port",
            ) from None
        if part not in body:
            raise DynamoError(f"{self._url}{path} is not a response of dynamo: no key {part}")
        return body


def _parse_error(status: int, body: bytes) -> DynamoError:
    try:
        error = msgspec.json.decode(body, type=RouterErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = RouterErrorDetail(f"the server answered {status}")
    hint = API_KEY_HINT if status == HTTPStatus.UNAUTHORIZED else error.hint or ""
    return ERROR_BY_STATUS.get(status, DynamoError)(error.message, hint=hint)
