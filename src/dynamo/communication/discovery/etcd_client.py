"""One connection to one etcd server: typed calls, and errors that say what to do about them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from aetcd import rpc
from grpc import ChannelConnectivity, ssl_channel_credentials

from dynamo.communication.directory import RecordChange
from dynamo.communication.options import PlaneOptions, TlsFiles
from dynamo.communication.tls import client_tls_context
from dynamo.core.errors import ConfigError, PlaneUnavailable, TooLarge

MAX_MESSAGE_BYTES: Final = 64 << 20
_CHANNEL_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What every HTTP/2 server answers: a client's greeting and its settings, none."""
_REQUIRE_LEADER: Final = ("hasleader", "true")
_LEASE_NOT_FOUND_TEXT: Final = "requested lease not found"
_TOO_LARGE_TEXT: Final = "request is too large"


class LeaseNotFound(Exception):
    """The server does not know the lease (any more)."""


class RevisionCompacted(Exception):
    """The server has forgotten the revisions that were asked for: read the state anew."""


class EtcdEndpoint(msgspec.Struct, frozen=True):
    """Where one etcd server is."""

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class EtcdClient:
    """Calls of one channel. All raise `PlaneAway` when the server does not answer, or cannot."""

    def __init__(self, where: EtcdEndpoint, options: PlaneOptions) -> None:
        self.endpoint = where
        self._options = options
        self._timeout_s = options.dial_timeout_s
        self._metadata: tuple[tuple[str, str], ...] = (_REQUIRE_LEADER,)
        self._channel: Any = None
        self.closed = asyncio.Event()

    async def open(self, timeout_s: float) -> None:
        """Connect, authenticate, and see that it answers with a quorum behind it."""
        target, tls = str(self.endpoint), self._options.server_tls
        try:
            context = (
                await asyncio.to_thread(client_tls_context, tls) if self.endpoint.tls else None
            )
            async with asyncio.timeout(timeout_s):
                await self._check_reachable(context)
        except ConfigError as error:  # files that were there at the start
            raise PlaneUnavailable(f"etcd at {self.endpoint}: {error.message}") from None
        except (OSError, TimeoutError) as error:
            raise PlaneUnavailable(
                f"etcd at {self.endpoint}: {str(error) or 'no answer'}"
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
        """Return when the connection has broken."""
        await self._channel.wait_for_state_change(ChannelConnectivity.READY)

    async def close(self) -> None:
        """Cut every call."""
        self.closed.set()
        if self._channel is not None:
            await self._channel.close()

    async def grant(self, ttl_s: float) -> int:
        """A new lease."""
        request = rpc.LeaseGrantRequest(TTL=max(1, round(ttl_s)))
        answer = await self._call(rpc.LeaseStub(self._channel).LeaseGrant, request)
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> None:
        """Raises `LeaseGone`."""
        call = rpc.LeaseStub(self._channel).LeaseKeepAlive(metadata=self._metadata)
        with _translate_errors(self.endpoint):
            try:
                async with asyncio.timeout(self._timeout_s):
                    await call.write(rpc.LeaseKeepAliveRequest(ID=lease))
                    answer = await call.read()
            except TimeoutError:
                raise PlaneUnavailable(f"etcd at {self.endpoint}: no answer") from None
            finally:
                call.cancel()
        if not isinstance(answer, rpc.LeaseKeepAliveResponse):
            raise PlaneUnavailable(f"etcd at {self.endpoint} ended the call")
        if not answer.TTL:
            raise LeaseNotFound

    async def revoke(self, lease: int) -> None:
        """Its records go with it."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._call(rpc.LeaseStub(self._channel).LeaseRevoke, request)

    async def put(self, key: str, value: bytes, lease: int) -> None:
        """Raises `LeaseGone`, `TooLarge`."""
        request = rpc.PutRequest(key=key.encode(), value=value, lease=lease)
        await self._call(rpc.KVStub(self._channel).Put, request)

    async def delete(self, key: str, lease: int) -> None:
        """Delete the record if it is that lease's."""
        own = rpc.Compare(
            key=key.encode(),
            target=rpc.Compare.CompareTarget.LEASE,
            result=rpc.Compare.CompareResult.EQUAL,
            lease=lease,
        )
        remove = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key.encode()))
        request = rpc.TxnRequest(compare=[own], success=[remove])
        await self._call(rpc.KVStub(self._channel).Txn, request)

    async def get_prefix(self, prefix: str) -> tuple[int, Mapping[str, bytes]]:
        """The revision, and every record below `prefix` in it."""
        key, end = _prefix_range(prefix)
        request = rpc.RangeRequest(key=key, range_end=end)
        answer = await self._call(rpc.KVStub(self._channel).Range, request)
        records = {_decode_key(one.key): bytes(one.value) for one in answer.kvs}
        return int(answer.header.revision), records

    async def lease_of(self, key: str) -> int:
        """Whose record it is. Raises `LeaseGone` where there is none."""
        request = rpc.RangeRequest(key=key.encode())
        answer = await self._call(rpc.KVStub(self._channel).Range, request)
        if not answer.kvs or not answer.kvs[0].lease:
            raise LeaseNotFound
        return int(answer.kvs[0].lease)

    async def watch(
        self, prefix: str, revision: int
    ) -> AsyncGenerator[Sequence[RecordChange], None]:
        """Changes from `revision` on, in order. Raises `Compacted`. Never ends by itself."""
        key, end = _prefix_range(prefix)
        create = rpc.WatchCreateRequest(
            key=key, range_end=end, start_revision=revision, fragment=True
        )
        call = rpc.WatchStub(self._channel).Watch(metadata=self._metadata)
        with _translate_errors(self.endpoint):
            try:
                await call.write(rpc.WatchRequest(create_request=create))
                async for answer in call:
                    if answer.compact_revision:
                        raise RevisionCompacted
                    if answer.canceled:
                        raise PlaneUnavailable(f"etcd at {self.endpoint}: {answer.cancel_reason}")
                    if answer.events:
                        yield [_record_change(event) for event in answer.events]
            finally:
                call.cancel()
        raise PlaneUnavailable(f"etcd at {self.endpoint} ended the watch")

    async def _check_reachable(self, context: ssl.SSLContext | None) -> None:
        """See that somebody is there, and whom he takes: gRPC tells neither as well. A server that
        does not like our certificate says so only after the handshake."""
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
        answer = await self._call(rpc.AuthStub(self._channel).Authenticate, request)
        self._metadata = (_REQUIRE_LEADER, ("token", answer.token))

    async def _call(self, method: Any, request: Any) -> Any:
        with _translate_errors(self.endpoint):
            return await method(request, timeout=self._timeout_s, metadata=self._metadata)


@contextmanager
def _translate_errors(where: EtcdEndpoint) -> Iterator[None]:
    """gRPC's errors as ours. It cancels whoever waits for a call of a channel that is closed."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PlaneUnavailable(f"etcd at {where}: the connection was closed") from None
    except rpc.AioRpcError as error:
        details = error.details() or error.code().name
        if _LEASE_NOT_FOUND_TEXT in details:
            raise LeaseNotFound from None
        if _TOO_LARGE_TEXT in details:
            raise TooLarge(f"etcd at {where}: {details}") from None
        raise PlaneUnavailable(f"etcd at {where}: {details}") from None


def _prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """Key and end of all keys below `prefix`; etcd's "\\0" is every key from there on."""
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
    """Blocks."""
    paths = tls.ca, tls.key or tls.cert, tls.cert
    read = [Path(path).read_bytes() if path else None for path in paths]
    return ssl_channel_credentials(*read)
