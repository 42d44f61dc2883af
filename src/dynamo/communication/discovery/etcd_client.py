"""A client of one etcd server: typed calls whose errors are Dynamo's."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from aetcd import rpc
from grpc import ChannelConnectivity, StatusCode, ssl_channel_credentials

from dynamo.communication.directory import RecordChange
from dynamo.communication.options import PlaneOptions, TlsFiles
from dynamo.communication.tls import client_tls_context
from dynamo.core.errors import ConfigError, PlaneUnavailable, TooLarge
from dynamo.core.tasks import wait_for_first

MAX_MESSAGE_BYTES: Final = 64 << 20
PING_INTERVAL_S: Final = 0.5
"""Pause between an answer to a ping and the next ping."""
PING_TIMEOUT_S: Final = 0.6
_CHANNEL_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""HTTP/2 client preface with an empty SETTINGS frame. Every HTTP/2 server answers it."""
_REQUIRE_LEADER: Final = ("hasleader", "true")
_LEASE_NOT_FOUND_TEXT: Final = "requested lease not found"
_TOO_LARGE_TEXT: Final = "request is too large"


class LeaseNotFound(Exception):
    """The server does not know the lease, or not any more."""


class RevisionCompacted(Exception):
    """The server has compacted the requested revisions. The state must be read again."""


class EtcdEndpoint(msgspec.Struct, frozen=True):
    """Host and port of an etcd server."""

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class EtcdClient:
    """Makes calls over one gRPC channel. All raise `PlaneUnavailable` if the server fails."""

    def __init__(self, endpoint: EtcdEndpoint, options: PlaneOptions) -> None:
        self.endpoint = endpoint
        self._options = options
        self._timeout_s = options.dial_timeout_s
        self._metadata: tuple[tuple[str, str], ...] = (_REQUIRE_LEADER,)
        self._channel: Any = None
        self.closed = asyncio.Event()

    async def open(self, timeout_s: float) -> None:
        """Connect, authenticate, and check with a read that the cluster has a quorum."""
        target, tls = str(self.endpoint), self._options.server_tls
        try:
            context = (
                await asyncio.to_thread(client_tls_context, tls) if self.endpoint.tls else None
            )
            async with asyncio.timeout(timeout_s):
                await self._check_reachable(context)
        except ConfigError as error:  # certificate files that have become unreadable
            raise PlaneUnavailable(f"etcd at {self.endpoint}: {error.message}") from None
        except (OSError, TimeoutError) as error:
            raise PlaneUnavailable(
                f"etcd at {self.endpoint}: {str(error) or 'no response'}"
            ) from None
        if self.endpoint.tls:
            credentials = await asyncio.to_thread(_credentials, tls)
            self._channel = rpc.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        else:
            self._channel = rpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        if self._options.user:
            await self._authenticate()
        await self.get_prefix("\0")

    async def wait_disconnected(self) -> None:
        """Return when the connection breaks or the server leaves pings unanswered."""
        await wait_for_first(
            self._channel.wait_for_state_change(ChannelConnectivity.READY), self._ping_until_lost()
        )

    async def _ping_until_lost(self) -> None:
        """Return when the server leaves two pings in succession unanswered.

        A ping reads no record and needs no quorum. The first ping after this process was suspended
        may fail with its answer unread.
        """
        range_of = rpc.KVStub(self._channel).Range
        request = rpc.RangeRequest(key=b"\0", serializable=True, count_only=True)
        unanswered = 0
        while unanswered < 2:
            try:
                await range_of(request, timeout=PING_TIMEOUT_S, metadata=self._metadata)
            except rpc.AioRpcError as error:
                if error.code() is not StatusCode.DEADLINE_EXCEEDED:
                    return
                unanswered += 1
            else:
                unanswered = 0
                await asyncio.sleep(PING_INTERVAL_S)

    async def close(self) -> None:
        """Close the channel, which fails all calls."""
        self.closed.set()
        if self._channel is not None:
            await self._channel.close()

    async def grant(self, ttl_s: float) -> int:
        """Create a lease and return its id."""
        request = rpc.LeaseGrantRequest(TTL=max(1, round(ttl_s)))
        response = await self._call(rpc.LeaseStub(self._channel).LeaseGrant, request)
        return int(response.ID)

    async def keep_alive(self, lease: int) -> None:
        """Renew a lease. Raises `LeaseNotFound`."""
        call = rpc.LeaseStub(self._channel).LeaseKeepAlive(metadata=self._metadata)
        with _translate_errors(self.endpoint):
            try:
                async with asyncio.timeout(self._timeout_s):
                    await call.write(rpc.LeaseKeepAliveRequest(ID=lease))
                    response = await call.read()
            except TimeoutError:
                raise PlaneUnavailable(f"etcd at {self.endpoint}: no answer") from None
            finally:
                call.cancel()
        if not isinstance(response, rpc.LeaseKeepAliveResponse):
            raise PlaneUnavailable(f"etcd at {self.endpoint} ended the call")
        if not response.TTL:
            raise LeaseNotFound

    async def revoke(self, lease: int) -> None:
        """Revoke a lease, which deletes its records. Raises `LeaseNotFound`."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._call(rpc.LeaseStub(self._channel).LeaseRevoke, request)

    async def put(self, key: str, value: bytes, lease: int) -> None:
        """Write a record under a lease. Raises `LeaseNotFound`, `TooLarge`."""
        request = rpc.PutRequest(key=key.encode(), value=value, lease=lease)
        await self._call(rpc.KVStub(self._channel).Put, request)

    async def delete(self, key: str, lease: int) -> None:
        """Delete the record if it belongs to that lease."""
        is_owned = rpc.Compare(
            key=key.encode(),
            target=rpc.Compare.CompareTarget.LEASE,
            result=rpc.Compare.CompareResult.EQUAL,
            lease=lease,
        )
        remove = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key.encode()))
        request = rpc.TxnRequest(compare=[is_owned], success=[remove])
        await self._call(rpc.KVStub(self._channel).Txn, request)

    async def get_prefix(self, prefix: str) -> tuple[int, Mapping[str, bytes]]:
        """Return the store's revision and all records below `prefix` at that revision."""
        key, end = _prefix_range(prefix)
        request = rpc.RangeRequest(key=key, range_end=end)
        response = await self._call(rpc.KVStub(self._channel).Range, request)
        records = {_decode_key(record.key): bytes(record.value) for record in response.kvs}
        return int(response.header.revision), records

    async def lease_of(self, key: str) -> int:
        """Return the lease of a record. Raises `LeaseNotFound` if there is no record or lease."""
        request = rpc.RangeRequest(key=key.encode())
        response = await self._call(rpc.KVStub(self._channel).Range, request)
        if not response.kvs or not response.kvs[0].lease:
            raise LeaseNotFound
        return int(response.kvs[0].lease)

    async def watch(
        self, prefix: str, revision: int
    ) -> AsyncGenerator[Sequence[RecordChange], None]:
        """Yield changes from `revision` on in order, for ever. Raises `RevisionCompacted`."""
        key, end = _prefix_range(prefix)
        create = rpc.WatchCreateRequest(
            key=key, range_end=end, start_revision=revision, fragment=True
        )
        call = rpc.WatchStub(self._channel).Watch(metadata=self._metadata)
        with _translate_errors(self.endpoint):
            try:
                await call.write(rpc.WatchRequest(create_request=create))
                async for response in call:
                    if response.compact_revision:
                        raise RevisionCompacted
                    if response.canceled:
                        raise PlaneUnavailable(f"etcd at {self.endpoint}: {response.cancel_reason}")
                    if response.events:
                        yield [_record_change(event) for event in response.events]
            finally:
                call.cancel()
        raise PlaneUnavailable(f"etcd at {self.endpoint} ended the watch")

    async def _check_reachable(self, context: ssl.SSLContext | None) -> None:
        """Connect without gRPC, whose errors do not say why a connection or handshake failed.

        A server that rejects the client's certificate reports it only after the TLS handshake.
        """
        if context is not None:
            context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection(
            self.endpoint.host, self.endpoint.port, ssl=context
        )
        try:
            if context is not None:
                writer.write(_HTTP2_PREFACE)
                await reader.read(1)
        finally:
            writer.close()

    async def _authenticate(self) -> None:
        options = self._options
        request = rpc.AuthenticateRequest(name=options.user, password=options.password)
        response = await self._call(rpc.AuthStub(self._channel).Authenticate, request)
        self._metadata = (_REQUIRE_LEADER, ("token", response.token))

    async def _call(self, method: Any, request: Any) -> Any:
        with _translate_errors(self.endpoint):
            return await method(request, timeout=self._timeout_s, metadata=self._metadata)


@contextmanager
def _translate_errors(endpoint: EtcdEndpoint) -> Iterator[None]:
    """Raise gRPC's errors as Dynamo's. Closing a gRPC channel cancels the callers waiting on it."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PlaneUnavailable(f"etcd at {endpoint}: the connection was closed") from None
    except rpc.AioRpcError as error:
        details = error.details() or error.code().name
        if _LEASE_NOT_FOUND_TEXT in details:
            raise LeaseNotFound from None
        if _TOO_LARGE_TEXT in details:
            raise TooLarge(f"etcd at {endpoint}: {details}") from None
        raise PlaneUnavailable(f"etcd at {endpoint}: {details}") from None


def _prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """Return etcd's key range for `prefix`. A range end of "\\0" means all following keys."""
    key = prefix.encode()
    if not key:
        return b"\0", b"\0"
    return key, key[:-1] + bytes([key[-1] + 1])


def _record_change(event: Any) -> RecordChange:
    gone = event.type == rpc.Event.EventType.DELETE
    return RecordChange(_decode_key(event.kv.key), None if gone else bytes(event.kv.value))


def _decode_key(key: bytes) -> str:
    return key.decode(errors="replace")


def _credentials(tls: TlsFiles) -> Any:
    """Return gRPC's credentials from the PEM files. Blocks."""
    paths = tls.ca, tls.key or tls.cert, tls.cert
    contents = [Path(path).read_bytes() if path else None for path in paths]
    return ssl_channel_credentials(*contents)
