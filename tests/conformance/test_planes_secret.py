"""Planes with a secret and with certificates: all that they promise, and what strangers get."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.conformance.members import events, requests

from dynamo.communication import handshake
from dynamo.communication.addresses import parse_address
from dynamo.communication.frames import HELLO, FrameSplitter, pack_frame
from dynamo.communication.handshake import Hello, pack_hello
from dynamo.communication.options import PlaneOptions, TlsFiles
from dynamo.communication.requests import Requests, open_requests, protocol
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, InstanceGone, ProtocolError
from dynamo.testing.certificates import has_openssl, make_authority, make_certificate
from dynamo.testing.conformance.events import EventsConformance
from dynamo.testing.conformance.events import JoinEvents as JoinEvents
from dynamo.testing.conformance.requests import CallsConformance, echo_handler
from dynamo.testing.conformance.requests import JoinRequests as JoinRequests

SECRET = PlaneOptions(secret="0123456789abcdef-secret")
HERE = Context("request-1")
_places = itertools.count()


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
    return PlaneOptions(tls=TlsFiles(*(str(folder / one) for one in files)))


class TestRequestsSecret(CallsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinRequests]:
        async for join in requests("tcp:", SECRET):
            yield join


class TestRequestsTls(CallsConformance):
    @pytest.fixture
    async def join(self, certificates: Path) -> AsyncIterator[JoinRequests]:
        async for join in requests("tcp:", tls_of(certificates)):
            yield join


class TestRequestsTlsUvloop(CallsConformance):
    @pytest.fixture
    async def join(self, certificates: Path) -> AsyncIterator[JoinRequests]:
        async for join in requests("tcp:", tls_of(certificates)):
            yield join


class TestEventsSecret(EventsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinEvents]:
        async for join in events("tcp:", f"secret-{next(_places)}", SECRET):
            yield join


class TestEventsTls(EventsConformance):
    @pytest.fixture
    async def join(self, certificates: Path) -> AsyncIterator[JoinEvents]:
        async for join in events("tcp:", f"secret-{next(_places)}", tls_of(certificates)):
            yield join


@pytest.fixture
async def guarded() -> AsyncIterator[TcpRequests]:
    plane = await TcpRequests.open("tcp:", SECRET)
    await plane.serve("e", echo_handler)
    yield plane
    await plane.close()


async def works(server: Requests, options: PlaneOptions = SECRET) -> bool:
    client = await open_requests("tcp:", options)
    got: list[bytes] = []
    try:
        await client.call(server.address, "e", b"x", HERE, lambda item: not got.append(item))
    finally:
        await client.close()
    return got == [b"x"]


@pytest.mark.parametrize("secret", ["", "another-secret-of-ours"])
async def test_without_the_secret_nobody_is_answered(guarded: TcpRequests, secret: str) -> None:
    with pytest.raises(InstanceGone, match="secret"):
        await works(guarded, PlaneOptions(secret=secret))
    assert await works(guarded)


async def test_who_has_a_secret_does_not_speak_to_one_without() -> None:
    plane = await TcpRequests.open("tcp:")
    await plane.serve("e", echo_handler)
    with pytest.raises(InstanceGone, match="does not know this deployment's secret"):
        await works(plane)
    await plane.close()


@pytest.mark.parametrize(
    "says",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        pack_hello("events"),
        pack_frame(protocol.OPEN, b"\0" * 40),
        b"\xff" * 64,
    ],
)
async def test_a_stranger_gets_not_a_byte(guarded: TcpRequests, says: bytes) -> None:
    there = parse_address(guarded.address)
    reader, writer = await asyncio.open_connection(there.host, there.port)
    writer.write(says)
    assert await heard(reader) == b""
    writer.close()
    assert await works(guarded)


@pytest.mark.parametrize(
    "next_frame",
    [protocol.pack_open(1, "e", HERE, 0, b"x"), pack_frame(255, b"wrong"), pack_frame(255, b"")],
)
async def test_a_hello_without_proof_gets_a_hello_and_the_end(
    guarded: TcpRequests, next_frame: bytes
) -> None:
    there = parse_address(guarded.address)
    reader, writer = await asyncio.open_connection(there.host, there.port)
    writer.write(pack_hello("requests", nonce=b"n" * 16) + next_frame)
    frames = FrameSplitter().feed(await heard(reader))
    assert [kind for kind, _, _ in frames] in ([HELLO], [])
    writer.close()
    assert await works(guarded)


async def test_a_proof_is_good_for_one_connection_only(guarded: TcpRequests) -> None:
    """What was overheard on one connection opens no other."""
    relayed: list[bytes] = []
    there = parse_address(guarded.address)

    async def spy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(there.host, there.port)

        async def pass_on(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if to is forth:
                    relayed.append(data)
                to.write(data)
            to.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(pass_on(reader, forth))
            group.create_task(pass_on(back, writer))

    server = await asyncio.start_server(spy, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = await open_requests("tcp:", SECRET)
    address = f"tcp://127.0.0.1:{port}/{there.incarnation}"
    await client.call(address, "e", b"x", HERE, lambda _: True)
    await client.close()
    server.close()
    reader, writer = await asyncio.open_connection(there.host, there.port)
    writer.write(b"".join(relayed))
    kinds = [kind for kind, _, _ in FrameSplitter().feed(await heard(reader))]
    assert kinds in ([HELLO], [])
    writer.close()


async def test_who_stays_silent_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.05)
    plane = await TcpRequests.open("tcp:", SECRET)
    await plane.serve("e", echo_handler)
    there = parse_address(plane.address)
    reader, writer = await asyncio.open_connection(there.host, there.port)
    writer.write(pack_hello("requests", nonce=b"n" * 16))
    await heard(reader)
    writer.close()
    await plane.close()


async def test_a_strangers_certificate_is_not_enough(certificates: Path) -> None:
    make_authority(certificates, "other")
    make_certificate(certificates, "stranger", "other")
    plane = await TcpRequests.open("tcp:", tls_of(certificates))
    await plane.serve("e", echo_handler)
    false = TlsFiles(
        str(certificates / "ca.pem"),
        str(certificates / "stranger.pem"),
        str(certificates / "stranger.key"),
    )
    for options in (PlaneOptions(), PlaneOptions(tls=false)):
        with pytest.raises(InstanceGone):
            await works(plane, options)
    assert await works(plane, tls_of(certificates))
    await plane.close()


@pytest.fixture
def options(certificates: Path) -> list[PlaneOptions]:
    return [SECRET, tls_of(certificates)]


async def test_with_a_secret_or_certificates_a_plane_listens_wider(
    options: list[PlaneOptions],
) -> None:
    for one in options:
        plane = await TcpRequests.open("tcp://0.0.0.0:0", one)
        await plane.serve("e", echo_handler)
        assert parse_address(plane.address).host != "0.0.0.0"
        assert await works(plane, one)
        await plane.close()


async def test_a_public_host_is_what_others_are_told() -> None:
    told = msgspec.structs.replace(SECRET, advertised_host="10.1.2.3")
    plane = await TcpRequests.open("tcp://0.0.0.0:0", told)
    assert plane.address.startswith("tcp://10.1.2.3:")


async def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    for options, wanted in (
        (PlaneOptions(secret="short"), "shorter than"),
        (PlaneOptions(tls=TlsFiles(ca="ca.pem")), "mutual"),
        (PlaneOptions(tls=TlsFiles(*(str(tmp_path / one) for one in "abc"))), "certificate files"),
        (PlaneOptions(), "requires a secret"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            await open_requests("tcp://0.0.0.0:0", options)


async def test_fuzzed_connections_break_nothing(guarded: TcpRequests) -> None:
    """Hellos, proofs and openings, bent at random: nothing is answered that should not be."""
    rng = random.Random(7)
    there = parse_address(guarded.address)
    seeds = [
        pack_hello("requests", nonce=b"n" * 16),
        pack_frame(255, b"p" * 32),
        protocol.pack_open(1, "e", HERE, 0, b"x"),
        pack_frame(HELLO, msgspec.msgpack.encode(Hello("requests", "dynamo", nonce=b"n" * 16))),
    ]
    for _ in range(150):
        reader, writer = await asyncio.open_connection(there.host, there.port)
        data = bytearray(b"".join(rng.choices(seeds, k=rng.randint(1, 4))))
        for _ in range(rng.randint(0, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        writer.write(bytes(data[: rng.randint(1, len(data))]))
        writer.write_eof()
        answer = await heard(reader)
        kinds = [kind for kind, _, _ in FrameSplitter().feed(answer)]
        assert kinds in ([], [HELLO])
        writer.close()
    assert not guarded._server_connections
    assert await works(guarded)


async def heard(reader: asyncio.StreamReader) -> bytes:
    """All that is said before the end, however it ends."""
    said = b""
    try:
        while data := await reader.read(65536):
            said += data
    except ConnectionError:
        return said
    return said


def test_a_proof_is_of_one_end_and_plane() -> None:
    from dynamo.communication.handshake import check_proof, compute_proof

    one = compute_proof("s", "dialler", "requests", b"a", b"b")
    for other in (
        compute_proof("s", "listener", "requests", b"a", b"b"),
        compute_proof("s", "dialler", "events", b"a", b"b"),
        compute_proof("t", "dialler", "requests", b"a", b"b"),
        compute_proof("s", "dialler", "requests", b"b", b"a"),
        b"",
    ):
        with pytest.raises(ProtocolError):
            check_proof(one, other, "x")
    check_proof(one, bytes(one), "x")
