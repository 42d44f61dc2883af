"""What a running deployment tells of its routing, fetched over HTTP."""

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
    """An error's body."""

    message: str = ""
    hint: str | None = None


class RouterErrorBody(msgspec.Struct, frozen=True):
    """Around it."""

    error: RouterErrorDetail = RouterErrorDetail()


class RouterClient:
    """The HTTP port of a frontend, or of a router of its own."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key = api_key

    def explain(self, request_id: str = "") -> list[dict[str, Any]]:
        """The decisions for a request, or the last ones. Raises `NotFound`. Blocks."""
        path = f"/router/explain/{quote(request_id)}" if request_id else "/router/explain"
        decisions: list[dict[str, Any]] = self._get_json(path, "decisions")["decisions"]
        return decisions

    def report(self, seconds: float | None = None) -> dict[str, Any]:
        """A `PerformanceReport`. Blocks."""
        query = "" if seconds is None else f"?seconds={seconds:g}"
        return self._get_json(f"/router/report{query}", "aggregated_metrics")

    def samples(self) -> list[dict[str, Any]]:
        """Every worker over time. Blocks."""
        samples: list[dict[str, Any]] = self._get_json("/router/timeline", "samples")["samples"]
        return samples

    def _get_json(self, path: str, part: str) -> dict[str, Any]:
        """What `path` answers, which has a `part`."""
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        ask = urllib.request.Request(self._url + path, headers=headers)  # noqa: S310 - the user's
        try:
            with urllib.request.urlopen(ask, timeout=HTTP_TIMEOUT_S) as answer:  # noqa: S310
                found = msgspec.json.decode(answer.read(), type=dict[str, Any])
        except urllib.error.HTTPError as error:
            with error:
                raise _parse_error(error.code, error.read()) from None
        except (msgspec.DecodeError, UnicodeDecodeError, HTTPException) as error:
            raise DynamoError(f"{self._url}{path} is no answer of ours: {error}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ModelNotReady(
                f"nobody answers at {self._url}: {getattr(reason, 'strerror', None) or reason}",
                hint="`dynamo ps` lists what runs; --url says where",
            ) from None
        if part not in found:
            raise DynamoError(f"{self._url}{path} is no answer of ours: it has no {part}")
        return found


def _parse_error(status: int, body: bytes) -> DynamoError:
    try:
        spoken = msgspec.json.decode(body, type=RouterErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        spoken = RouterErrorDetail(f"the server answered {status}")
    hint = API_KEY_HINT if status == HTTPStatus.UNAUTHORIZED else spoken.hint or ""
    return ERROR_BY_STATUS.get(status, DynamoError)(spoken.message, hint=hint)
