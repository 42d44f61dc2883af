"""Sends the traces of requests to a collector of OpenTelemetry, as its variables say."""

from __future__ import annotations

import asyncio
import gzip
import logging
import ssl
from collections import Counter, deque
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

import msgspec

import dynamo
from dynamo.application.http_errors import statuses_by_code
from dynamo.communication.http.client import HttpClient
from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.operations.observer.spans import SpanEncoder, load_trace_types
from dynamo.operations.observer.stories import KeptStory, is_moved
from dynamo.telemetry.metrics import Registry
from dynamo.telemetry.slo import FAILED
from dynamo.telemetry.trace_context import SAMPLED, exports_traces, is_chosen, make_trace_id

log = logging.getLogger(__name__)

DEFAULT_RATIO = 0.01
INTERVAL_S = 1.0
MAX_PENDING = 4_096
BATCH = 256
CLIENT_SAMPLED_PER_S = 100
"""So many requests a second are exported because their clients ask for it."""
RETRIES = 3
RETRY_S, MAX_RETRY_S = 1.0, 30.0
RETRIED = (429, 502, 503, 504)
TRACES_PATH = "/v1/traces"
PROTOBUF = "application/x-protobuf"


class TraceOptions(msgspec.Struct, frozen=True):
    """Where traces go, and which ones. `ratio`: the share of requests that are like others. `tail`:
    those that failed, moved or were late, too. `parent`: the client's flag decides where it has
    one."""

    url: str
    headers: Mapping[str, str] = {}
    resource: Mapping[str, str] = {}
    timeout_s: float = 10.0
    compressed: bool = False
    ratio: float = DEFAULT_RATIO
    tail: bool = True
    parent: bool = True

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> TraceOptions | None:
        """Read OpenTelemetry's variables; None without a collector. Raises `ConfigError`."""
        if not exports_traces(environ):
            return None

        def read(name: str, default: str = "") -> str:
            return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(
                f"OTEL_EXPORTER_OTLP_{name}", default
            )

        protocol = read("PROTOCOL", "http/protobuf")
        if protocol != "http/protobuf":
            raise _wrong("OTEL_EXPORTER_OTLP_PROTOCOL", protocol, "http/protobuf; grpc is not sent")
        url = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
        if not url:
            url = environ["OTEL_EXPORTER_OTLP_ENDPOINT"].rstrip("/") + TRACES_PATH
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise _wrong("OTEL_EXPORTER_OTLP_ENDPOINT", url, "such as http://127.0.0.1:4318")
        timeout = read("TIMEOUT", "10000")
        if not timeout.isdecimal():
            raise _wrong("OTEL_EXPORTER_OTLP_TIMEOUT", timeout, "milliseconds, such as 10000")
        load_trace_types()
        resource = {
            "service.name": environ.get("OTEL_SERVICE_NAME") or "dynamo",
            "service.version": dynamo.__version__,
        }
        attributes = _read_pairs(environ, "OTEL_RESOURCE_ATTRIBUTES")
        if environ.get("OTEL_SERVICE_NAME"):
            attributes.pop("service.name", None)
        ratio, tail, parent = _read_sampler(environ)
        headers = _read_pairs({"H": read("HEADERS")}, "H")
        return cls(
            url,
            {name.lower(): value for name, value in headers.items()},
            resource | attributes,
            int(timeout) / 1e3,
            read("COMPRESSION") == "gzip",
            ratio,
            tail,
            parent,
        )


def _wrong(name: str, value: str, wanted: str) -> ConfigError:
    hint = "OTEL_SDK_DISABLED=true turns tracing off"
    return ConfigError(f"{name} is {value[:100]!r}; wanted: {wanted}", hint=hint, param=name)


def _read_pairs(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """Read NAME=VALUE,NAME=VALUE with %-escapes."""
    pairs = (pair.partition("=") for pair in environ.get(name, "").split(",") if "=" in pair)
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs}


def _read_sampler(environ: Mapping[str, str]) -> tuple[float, bool, bool]:
    name = environ.get("OTEL_TRACES_SAMPLER", "")
    if not name:
        return DEFAULT_RATIO, True, True
    parent, kind = name.startswith("parentbased_"), name.removeprefix("parentbased_")
    if kind in ("always_on", "always_off"):
        return float(kind == "always_on"), False, parent
    argument = environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        ratio = float(argument)
    except ValueError:
        ratio = -1.0
    if kind != "traceidratio":
        raise _wrong("OTEL_TRACES_SAMPLER", name, "parentbased_traceidratio, always_on, always_off")
    if not 0 <= ratio <= 1:
        raise _wrong("OTEL_TRACES_SAMPLER_ARG", argument, "a share from 0 to 1")
    return ratio, True, parent


class TraceExporter:
    """Chooses ended requests, and sends their spans once a second. A collector that is slow, away
    or refuses costs a counter, never a request."""

    def __init__(self, options: TraceOptions, clock: Clock, metrics: Registry) -> None:
        """Raises `ConfigError`."""
        self._options, self._clock = options, clock
        self._encoder = SpanEncoder(options.resource, statuses_by_code())
        self._pending: deque[KeptStory] = deque()
        self._client_sampled: tuple[int, int] = (0, 0)
        self.dropped: Counter[str] = Counter(
            dict.fromkeys(("queue_full", "unreachable", "refused"), 0)
        )
        self.sent = 0
        self._failure = ""
        tls = ssl.create_default_context() if options.url.startswith("https:") else None
        headers = dict(options.headers) | {"content-type": PROTOBUF}
        if options.compressed:
            headers["content-encoding"] = "gzip"
        parts = urlsplit(options.url)
        self._path = parts.path + (f"?{parts.query}" if parts.query else "")
        self._client = HttpClient(f"{parts.scheme}://{parts.netloc}", headers, tls)
        metrics.counter(
            "dynamo_spans_dropped_total",
            "Requests whose spans were not exported: queue_full, unreachable, refused",
            ("why",),
            callback=lambda: {(why,): count for why, count in self.dropped.items()},
        )
        metrics.counter(
            "dynamo_traces_exported_total",
            "Requests whose spans a collector has taken",
            callback=lambda: {(): self.sent},
        )

    def add(self, entry: KeptStory) -> None:
        """Export a request that has ended if it is chosen."""
        story = entry.story
        is_wanted = self._is_wanted(entry)
        if not story.trace:
            story.trace = make_trace_id(story.request_id)
        if not is_wanted:
            return
        if len(self._pending) >= MAX_PENDING:
            self.dropped["queue_full"] += 1
            return
        self._pending.append(entry)

    def _is_wanted(self, entry: KeptStory) -> bool:
        story, options = entry.story, self._options
        flags = story.trace_flags if options.parent else None
        if flags is not None:
            return bool(flags & SAMPLED) and self._is_within_rate()
        matters = options.tail and (story.slo >= FAILED or is_moved(story))
        if story.trace_flags is None:  # frontends begin the traces of a share of all requests
            return matters or bool(story.trace)
        return matters or is_chosen(story.trace, options.ratio)

    def _is_within_rate(self) -> bool:
        second = int(self._clock.now())
        before, count = self._client_sampled
        count = count + 1 if second == before else 1
        self._client_sampled = second, count
        return count <= CLIENT_SAMPLED_PER_S

    async def run(self) -> None:
        """Export until cancelled."""
        while True:
            await self._clock.sleep(INTERVAL_S)
            while self._pending:
                count = min(BATCH, len(self._pending))
                await self._export([self._pending.popleft() for _ in range(count)])

    async def _export(self, entries: list[KeptStory]) -> None:
        why, self._failure = "refused", ""
        try:
            body = await self._clock.offload(self._encode, entries)
            why = await self._post(body)
        except Exception:  # nonsense of a story must not end the export of others
            log.exception("spans were not exported")
        if why:
            if not self.dropped[why]:
                fields = {"url": self._options.url, "reason": why, "answer": self._failure}
                log.warning("a collector does not take spans", extra={"fields": fields})
            self.dropped[why] += len(entries)
        else:
            self.sent += len(entries)

    def _encode(self, entries: list[KeptStory]) -> bytes:
        body = self._encoder.encode(entries)
        return gzip.compress(body, 1) if self._options.compressed else body

    async def _post(self, body: bytes) -> str:
        """Send a message, and return why it was dropped, or "". The body of the answer is not
        read: some collectors answer JSON."""
        wait_s = RETRY_S
        for number in range(RETRIES):
            after = ""
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    answer = await self._client.send("POST", self._path, body)
            except (OSError, TimeoutError) as error:
                self._failure = str(error) or f"no answer within {self._options.timeout_s:g} s"
            else:
                self._failure = f"HTTP {answer.status}"
                if answer.status not in RETRIED:
                    is_taken = HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES
                    return "" if is_taken else "refused"
                after = answer.headers.get("retry-after", "")
            if number < RETRIES - 1:
                asked_s = float(after) if after.isdecimal() else wait_s
                await self._clock.sleep(min(asked_s, MAX_RETRY_S))
                wait_s *= 2
        return "unreachable"

    def close(self) -> None:
        """Close the connections to the collector."""
        self._client.close()
