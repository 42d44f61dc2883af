"""HTTP client of a deployment's observer."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

import dynamo_client
from dynamo.core.errors import DynamoError, InvalidRequest, ModelNotReady, NotFound, Unauthorized
from dynamo_client import DynamoConfig
from dynamo_client.api_requests import RequestSpec
from dynamo_client.network import BlockingNetworkBackend, run_blocking
from dynamo_client.session import ClientSession

HTTP_TIMEOUT_S = 10.0
ARRIVAL_S, RETRY_S = 2.5, 0.25
API_KEY_HINT = "--api-key KEY, or $DYNAMO_API_KEY"
ERROR_BY_STATUS: dict[int, type[DynamoError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    404: NotFound,
}


class RouterClient:
    """Client of the HTTP port of an observer, or of a process that redirects to it. Every method
    blocks and raises `DynamoError` if no server can be reached or it answers with an error."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = HTTP_TIMEOUT_S) -> None:
        self._api_key = api_key or None
        self._timeout_s = timeout_s
        self._open(url)

    def _open(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        config = DynamoConfig(url, api_key=self._api_key, timeout=self._timeout_s)
        self._session = ClientSession(config, BlockingNetworkBackend())

    def explain(self, request_id: str = "") -> list[dict[str, Any]]:
        """Fetch the decisions for a request, or the last ones. Raises `NotFound`."""
        path = f"/router/explain/{quote(request_id)}" if request_id else "/router/explain"
        return (
            self._find_json(path, "decisions") if request_id else self._get_list(path, "decisions")
        )

    def report(self, seconds: float | None = None) -> dict[str, Any]:
        """Fetch a `PerformanceReport` of the last `seconds`."""
        query = "" if seconds is None else f"?seconds={seconds:g}"
        return self._get_json(f"/router/report{query}", "aggregated_metrics")

    def timeline(self, seconds: float | None = None) -> dict[str, Any]:
        """Fetch the series of every worker of the last `seconds`, at most 15 minutes."""
        query = "" if seconds is None else f"?seconds={seconds:g}"
        return self._get_json(f"/router/timeline{query}", "workers")

    def find_stories(self, name: str) -> list[dict[str, Any]]:
        """Fetch the stories of a request id or trace id, the newest first. Raises `NotFound`."""
        return self._find_json(f"/requests/{quote(name, safe='')}", "requests")

    def list_stories(self, **wanted: Any) -> list[dict[str, Any]]:
        """Fetch the newest stories that are `slow` (seconds), `failed` or of a `worker`."""
        return self._get_list(f"/requests?{urlencode(wanted)}", "requests")

    def group_causes(self, seconds: float) -> list[dict[str, Any]]:
        """Fetch what made the requests of the last `seconds` late."""
        return self._get_list(f"/causes?seconds={seconds:g}", "causes")

    def slo(self) -> dict[str, Any]:
        """Fetch the report of `dynamo slo`."""
        return self._get_json("/slo", "windows")

    def activity(self, seconds: int) -> dict[str, Any]:
        """Fetch an `Activity` with the pace of the last seconds."""
        return self._get_json(f"/activity?seconds={seconds}", "pace")

    def _find_json(self, path: str, part: str) -> list[dict[str, Any]]:
        """Fetch a list of something that may have happened just now: its story comes within
        `ARRIVAL_S`. Raises `NotFound`."""
        deadline_s = time.monotonic() + ARRIVAL_S
        while True:
            try:
                return self._get_list(path, part)
            except NotFound:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(RETRY_S)

    def _get_list(self, path: str, part: str) -> list[dict[str, Any]]:
        return self._get_json(path, part)[part]  # type: ignore[no-any-return]

    def _get_json(self, path: str, part: str) -> dict[str, Any]:
        """Fetch the JSON object at `path`, which must have the key `part`."""
        try:
            body = run_blocking(self._session.request(RequestSpec(path), retry=False))
        except dynamo_client.DynamoAPIError as error:
            if error.status == HTTPStatus.TEMPORARY_REDIRECT:  # a frontend names its observer
                location = msgspec.json.decode(error.body)["location"]
                self._open(location.removesuffix(path))
                return self._get_json(path, part)
            if error.status == HTTPStatus.OK:
                raise self._foreign_error(path, error.message) from None
            hint = API_KEY_HINT if error.status == HTTPStatus.UNAUTHORIZED else error.hint
            raise ERROR_BY_STATUS.get(error.status, DynamoError)(error.message, hint=hint) from None
        except dynamo_client.DynamoError as error:
            raise ModelNotReady(
                error.message, hint="`dynamo ps` lists what runs; --url names the port"
            ) from None
        if part not in body:
            raise self._foreign_error(path, f"no key {part}")
        return body

    def _foreign_error(self, path: str, reason: str) -> DynamoError:
        return DynamoError(f"{self.url}{path} is not a response of dynamo: {reason}")
