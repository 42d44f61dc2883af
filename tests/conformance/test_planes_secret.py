"""Planes with a secret and with certificates: the suites, and the rejection of strangers."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.conformance.planes import join_events, join_requests
from tests.support.certificates import has_openssl, make_authority, make_certificate

from dynamo.communication import handshake
from dynamo.communication.addresses import parse_address
from dynamo.communication.frames import HELLO, FrameSplitter, pack_frame
from dynamo.communication.handshake import Hello, pack_hello
from dynamo.communication.options import PlaneOptions, TlsFiles
from dynamo.communication.requests import Requests, open_requests, protocol
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, InstanceGone, ProtocolError
from dynamo_conformance.events import EventsConformance
from dynamo_conformance.events import JoinEvents as JoinEvents
from dynamo_conformance.requests import CallsConformance, echo_handler
from dynamo_conformance.requests import JoinRequests as JoinRequests

SECRET = PlaneOptions(secret="0123456789abcdef-secret")
CONTEXT = Context("request-1")
_names = itertools.count()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not has_openssl():
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder)
    make_certificate(folder, "node")
    return folder


def tls_of(folder: Path, name: str = "node", authority: str = "ca") -> PlaneOptions:
    files = (f"{authority}.pem", f"{name}.pem", f"{name}.key")
    return PlaneOptions(tls=TlsFiles(*(str(folder / file) for file in files)))


class TestRequestsSecret(CallsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinRequests]:
        async for join in join_requests("tcp:", SECRET):
            yield join


class TestRequestsTls(CallsConformance):
    @pytest.fixture
    async def join(self, certificates: Path) -> AsyncIterator[JoinRequests]:
        async for join in join_requests("tcp:", tls_of(certificates)):
            yield join


class TestRequestsTlsUvloop(CallsConformance):
    @pytest.fixture
    async def join(self, certificates: Path) -> AsyncIterator[JoinRequests]:
        async for join in join_requests("tcp:", tls_of(certificates)):
            yield join


class TestEventsSecret(EventsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinEvents]:
        async for join in join_events("tcp:", f"secret-{next(_names)}", SECRET):
            yield join


class TestEventsTls(EventsConformance):
    @pytest.fixture
    async def join(self, certificates: Path) -> AsyncIterator[JoinEvents]:
        async for join in join_events("tcp:", f"secret-{next(_names)}", tls_of(certificates)):
            yield join


@pytest.fixture
async def guarded() -> AsyncIterator[TcpRequests]:
    plane = await TcpRequests.open("tcp:", SECRET)
    await plane.serve("e", echo_handler)
    yield plane
    await plane.close()


async def works(server: Requests, options: PlaneOptions = SECRET) -> bool:
    client = await open_requests("tcp:", options)
    received: list[bytes] = []
    try:
        await client.call(
            server.address, "e", b"x", CONTEXT, lambda item: not received.append(item)
        )
    finally:
        await client.close()
    return received == [b"x"]


@pytest.mark.parametrize("secret", ["", "another-secret-of-ours"])
async def test_a_client_without_the_secret_is_refused(guarded: TcpRequests, secret: str) -> None:
    with pytest.raises(InstanceGone, match="secret"):
        await works(guarded, PlaneOptions(secret=secret))
    assert await works(guarded)


async def test_a_client_with_a_secret_refuses_a_server_without() -> None:
    plane = await TcpRequests.open("tcp:")
    await plane.serve("e", echo_handler)
    with pytest.raises(InstanceGone, match="does not know this deployment's secret"):
        await works(plane)
    await plane.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        pack_hello("events"),
        pack_frame(protocol.OPEN, b"\0" * 40),
        b"\xff" * 64,
    ],
)
async def test_a_stranger_gets_no_answer(guarded: TcpRequests, greeting: bytes) -> None:
    address = parse_address(guarded.address)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(greeting)
    assert await read_all(reader) == b""
    writer.close()
    assert await works(guarded)


@pytest.mark.parametrize(
    "next_frame",
    [protocol.pack_open(1, "e", CONTEXT, 0, b"x"), pack_frame(255, b"wrong"), pack_frame(255, b"")],
)
async def test_a_hello_without_proof_is_disconnected_after_the_hello(
    guarded: TcpRequests, next_frame: bytes
) -> None:
    address = parse_address(guarded.address)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(pack_hello("requests", nonce=b"n" * 16) + next_frame)
    frames = FrameSplitter().feed(await read_all(reader))
    assert [kind for kind, _, _ in frames] in ([HELLO], [])
    writer.close()
    assert await works(guarded)


async def test_a_recorded_proof_is_refused_on_another_connection(guarded: TcpRequests) -> None:
    relayed: list[bytes] = []
    address = parse_address(guarded.address)

    async def spy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection(address.host, address.port)

        async def forward(source: asyncio.StreamReader, destination: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if destination is target_writer:
                    relayed.append(data)
                destination.write(data)
            destination.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(forward(reader, target_writer))
            group.create_task(forward(target_reader, writer))

    server = await asyncio.start_server(spy, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = await open_requests("tcp:", SECRET)
    relay_address = f"tcp://127.0.0.1:{port}/{address.incarnation}"
    await client.call(relay_address, "e", b"x", CONTEXT, lambda _: True)
    await client.close()
    server.close()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"".join(relayed))
    kinds = [kind for kind, _, _ in FrameSplitter().feed(await read_all(reader))]
    assert kinds in ([HELLO], [])
    writer.close()


async def test_an_unfinished_handshake_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.05)
    plane = await TcpRequests.open("tcp:", SECRET)
    await plane.serve("e", echo_handler)
    address = parse_address(plane.address)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(pack_hello("requests", nonce=b"n" * 16))
    await read_all(reader)
    writer.close()
    await plane.close()


async def test_a_certificate_of_another_authority_is_refused(certificates: Path) -> None:
    make_authority(certificates, "other")
    make_certificate(certificates, "stranger", "other")
    plane = await TcpRequests.open("tcp:", tls_of(certificates))
    await plane.serve("e", echo_handler)
    untrusted = TlsFiles(
        str(certificates / "ca.pem"),
        str(certificates / "stranger.pem"),
        str(certificates / "stranger.key"),
    )
    for options in (PlaneOptions(), PlaneOptions(tls=untrusted)):
        with pytest.raises(InstanceGone):
            await works(plane, options)
    assert await works(plane, tls_of(certificates))
    await plane.close()


@pytest.fixture
def options(certificates: Path) -> list[PlaneOptions]:
    return [SECRET, tls_of(certificates)]


async def test_a_plane_with_a_secret_or_certificates_listens_beyond_loopback(
    options: list[PlaneOptions],
) -> None:
    for plane_options in options:
        plane = await TcpRequests.open("tcp://0.0.0.0:0", plane_options)
        await plane.serve("e", echo_handler)
        assert parse_address(plane.address).host != "0.0.0.0"
        assert await works(plane, plane_options)
        await plane.close()


async def test_the_advertised_host_is_published() -> None:
    options = msgspec.structs.replace(SECRET, advertised_host="10.1.2.3")
    plane = await TcpRequests.open("tcp://0.0.0.0:0", options)
    assert plane.address.startswith("tcp://10.1.2.3:")


async def test_bad_options_are_explained(tmp_path: Path) -> None:
    for options, expected in (
        (PlaneOptions(secret="short"), "shorter than"),
        (PlaneOptions(tls=TlsFiles(ca="ca.pem")), "mutual"),
        (
            PlaneOptions(tls=TlsFiles(*(str(tmp_path / name) for name in "abc"))),
            "cannot read",
        ),
        (PlaneOptions(), "requires a secret"),
    ):
        with pytest.raises(ConfigError, match=expected):
            await open_requests("tcp://0.0.0.0:0", options)


async def test_fuzzed_connections_break_nothing(guarded: TcpRequests) -> None:
    """Mutated hellos, proofs and OPEN frames never get more than a hello."""
    rng = random.Random(7)
    address = parse_address(guarded.address)
    seeds = [
        pack_hello("requests", nonce=b"n" * 16),
        pack_frame(255, b"p" * 32),
        protocol.pack_open(1, "e", CONTEXT, 0, b"x"),
        pack_frame(HELLO, msgspec.msgpack.encode(Hello("requests", "dynamo", nonce=b"n" * 16))),
    ]
    for _ in range(150):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        data = bytearray(b"".join(rng.choices(seeds, k=rng.randint(1, 4))))
        for _ in range(rng.randint(0, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        writer.write(bytes(data[: rng.randint(1, len(data))]))
        writer.write_eof()
        answer = await read_all(reader)
        kinds = [kind for kind, _, _ in FrameSplitter().feed(answer)]
        assert kinds in ([], [HELLO])
        writer.close()
    assert not guarded._server_connections
    assert await works(guarded)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection ends or breaks."""
    received = b""
    try:
        while data := await reader.read(65536):
            received += data
    except ConnectionError:
        return received
    return received


def test_a_proof_depends_on_end_plane_secret_and_nonces() -> None:
    from dynamo.communication.handshake import check_proof, compute_proof

    proof = compute_proof("s", "dialler", "requests", b"a", b"b", "process")
    for wrong in (
        compute_proof("s", "listener", "requests", b"a", b"b", "process"),
        compute_proof("s", "dialler", "events", b"a", b"b", "process"),
        compute_proof("t", "dialler", "requests", b"a", b"b", "process"),
        compute_proof("s", "dialler", "requests", b"b", b"a", "process"),
        compute_proof("s", "dialler", "requests", b"a", b"b", "another process"),
        b"",
    ):
        with pytest.raises(ProtocolError):
            check_proof(proof, wrong, "x")
    check_proof(proof, bytes(proof), "x")
