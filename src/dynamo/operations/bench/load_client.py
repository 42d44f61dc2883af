"""Requests of the load generator, sampled while their answers arrive."""

from __future__ import annotations

import asyncio
import ssl
from time import monotonic as now
from typing import Any

import msgspec

from dynamo.communication.http.client import HttpClient
from dynamo.core.errors import ConfigError, DynamoError
from dynamo.operations.bench.request_sample import RequestSample
from dynamo.operations.bench.workload import BenchTarget
from dynamo_client.config import parse_base_url


class Unreachable(DynamoError):
    """The measured server cannot be reached or lacks an API that the measurement needs."""

    code = "unreachable"


class LoadClient:
    """Sends requests to the target. Raises `ConfigError` for what is no URL."""

    def __init__(self, target: BenchTarget) -> None:
        try:
            origin, base_path = parse_base_url(target.url)
        except ValueError:
            hint = "such as http://127.0.0.1:8000"
            raise ConfigError(f"not a URL: {target.url!r}", hint=hint) from None
        url = f"http{'s' * origin.secure}://{origin.authority}{base_path}"
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        tls = ssl.create_default_context() if origin.secure else None
        self._http = HttpClient(url, headers, tls)
        self._target = target

    async def send(self, path: str, body: bytes, sample: RequestSample) -> None:
        """Send a request. Failures are recorded in the sample."""
        sample.sent_at = now()
        try:
            async with asyncio.timeout(self._target.timeout_s or None):
                answer = await self._http.send("POST", path, body, sample.feed)
            sample.finish(answer.status, answer.body)
        except OSError as error:
            sample.error = _describe(error)
        finally:
            sample.ended_at = now()

    async def fetch_json(
        self, path: str, body: Any = None, method: str = "POST"
    ) -> tuple[int, Any]:
        """Send one plain request and return the status and the JSON body, None if the body is not
        JSON. Raises `Unreachable`."""
        content = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(self._target.timeout_s or None):
                answer = await self._http.send(method, path, content)
        except OSError as error:
            raise Unreachable(
                f"{self._target.url}: {_describe(error)}",
                hint="`dynamo ps` lists the deployments that run on this host",
            ) from None
        try:
            return answer.status, msgspec.json.decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return answer.status, None

    def close(self) -> None:
        """Close every connection."""
        self._http.close()


def _describe(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    lost = error.errno is None
    return "connection lost" if lost else f"cannot connect: {error.strerror or error}"
