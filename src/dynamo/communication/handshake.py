"""The handshake of every connection: plane, protocol version, incarnation, proof of the secret.

    client -> server: HELLO, then PROOF if there is a secret
    server -> client: HELLO

Each end proves the secret with an HMAC over both nonces and the incarnation. The secret itself is
never sent. Version N is compatible with N-1. There is no version before the first.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from dynamo.communication.frames import HELLO, pack_frame
from dynamo.communication.link import HandshakeLink
from dynamo.communication.transports import HANDSHAKE_TIMEOUT_S, UnprovenLinks
from dynamo.core.errors import DECODE_ERRORS, InstanceGone, ProtocolError

VERSION: Final = 1
MIN_VERSION: Final = 1
MAGIC: Final = "dynamo"
PROOF: Final = 255
NONCE_BYTES: Final = 16


class Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first frame of each end. Unknown fields are ignored.

    `oldest` to `version` is the range of protocol versions that the sender speaks; version 1 is
    not encoded. `incarnation` is that of the server's process. `nonce` is empty if the sender has
    no secret. `proof` is the server's proof of the secret.
    """

    plane: str
    magic: str = ""
    version: int = 1
    oldest: int = 1
    incarnation: str = ""
    nonce: bytes = b""
    proof: bytes = b""


_decode = msgspec.msgpack.Decoder(Hello).decode


def pack_hello(
    plane: str, incarnation: str = "", *, nonce: bytes = b"", proof: bytes = b""
) -> bytes:
    """Encode the frame that each end sends first."""
    hello = Hello(plane, MAGIC, VERSION, MIN_VERSION, incarnation, nonce=nonce, proof=proof)
    return pack_frame(HELLO, msgspec.msgpack.encode(hello))


def decode_hello(kind: int, body: bytes, plane: str) -> Hello:
    """Decode the peer's hello of any version. Raises `ProtocolError` for other frames."""
    if kind != HELLO:
        raise ProtocolError(f"the first frame is of kind {kind}, not a hello")
    try:
        hello = _decode(body)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"unreadable hello: {error}") from error
    if hello.magic != MAGIC or hello.plane != plane:
        raise ProtocolError(f"a hello of plane {hello.plane!r} arrived at a {plane!r} port")
    return hello


def check_version(hello: Hello) -> None:
    """Raise `ProtocolError` if there is no version that both ends speak."""
    if min(VERSION, hello.version) < max(MIN_VERSION, hello.oldest):
        raise ProtocolError(
            f"the peer speaks protocol {hello.oldest} to {hello.version}, "
            f"this process {MIN_VERSION} to {VERSION}"
        )


def new_nonce(secret: str) -> bytes:
    """Return a random nonce, or b"" if there is no secret to prove."""
    return secrets.token_bytes(NONCE_BYTES) if secret else b""


def compute_proof(
    secret: str, end: str, plane: str, dialler: bytes, listener: bytes, incarnation: str
) -> bytes:
    """Return the HMAC-SHA256 by which `end` ("dialler" or "listener") proves the secret.
    `incarnation` is the server's."""
    message = b"\0".join((end.encode(), plane.encode(), dialler + listener + incarnation.encode()))
    return hmac.digest(secret.encode(), message, "sha256")


def check_proof(proof: bytes, expected: bytes, peer: str) -> None:
    """Raise `ProtocolError` if the proof is wrong. `peer` names the other end in the message."""
    if not hmac.compare_digest(proof, expected):
        raise ProtocolError(f"{peer} does not know this deployment's secret (security.secret)")


NEEDS_SECRET = (
    "the server requires the deployment's secret: "  # noqa: S105 - a message
    "that of its discovery folder, or security.secret"
)


class ListeningProcess(Protocol):
    """The listening end of a handshake: its secret, and its links without a proof."""

    secret: str
    incarnation: str
    unproven_links: UnprovenLinks


LinkT = TypeVar("LinkT", bound=HandshakeLink)
CLOSED_DURING_HANDSHAKE: Final = (
    "the connection closed during the handshake, as it does where one end has TLS "
    "(security.tls_ca) and the other has not, or another CA"
)


class ClientHandshake(Generic[LinkT]):
    """The dialling end's handshake. The owner of the link passes events on until it is `done`."""

    def __init__(self, link: LinkT, plane: str, incarnation: str, secret: str = "") -> None:
        self._link = link
        self._plane = plane
        self._incarnation = incarnation
        self._secret = secret
        self._nonce = new_nonce(secret)
        self._completion: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def done(self) -> bool:
        """True once the handshake has succeeded or failed."""
        return self._completion.done()

    async def connect(self, dial: Callable[[LinkT], Awaitable[None]]) -> None:
        """Dial and wait for the handshake. The link is closed if an error is raised.

        Raises `OSError`, `TimeoutError`, `InstanceGone` if another incarnation answers, and
        `ProtocolError` if versions or secrets do not match.
        """
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await dial(self._link)
                await self._completion
        except BaseException:
            self._completion.cancel()
            self._link.abort()
            raise

    def send_hello(self) -> None:
        """Send the first frame of the connection."""
        self._link.write(pack_hello(self._plane, nonce=self._nonce))

    def receive(self, kind: int, body: bytes) -> None:
        """Handle the server's hello. Raises `ProtocolError`."""
        try:
            hello = decode_hello(kind, body, self._plane)
            check_version(hello)
            self._exchange_proofs(hello)
        except ProtocolError as error:
            self._completion.set_exception(error)
            raise
        if hello.incarnation != self._incarnation:
            self._completion.set_exception(InstanceGone("another process has this address now"))
            self._link.abort()
            return
        self._link.accept_large_frames()
        self._completion.set_result(None)

    def on_lost(self) -> None:
        """Fail the handshake because the connection was closed."""
        if not self.done:
            self._completion.set_exception(InstanceGone(CLOSED_DURING_HANDSHAKE))

    def _exchange_proofs(self, hello: Hello) -> None:
        """Check the server's proof, then send this end's: a false server learns nothing."""
        if not self._secret:
            if hello.nonce:
                raise ProtocolError(NEEDS_SECRET)
            return
        covered = self._plane, self._nonce, hello.nonce, hello.incarnation
        check_proof(hello.proof, compute_proof(self._secret, "listener", *covered), "the server")
        self._link.write(pack_frame(PROOF, compute_proof(self._secret, "dialler", *covered)))


class ServerHandshake:
    """The listening end's handshake: `receive` takes frames until it returns True.

    A client that has not completed it within `HANDSHAKE_TIMEOUT_S` is disconnected.
    """

    def __init__(self, link: HandshakeLink, plane: str, listener: ListeningProcess) -> None:
        self._link = link
        self._plane = plane
        self._incarnation = listener.incarnation
        self._secret = listener.secret
        self._unproven_links = listener.unproven_links
        self._unproven_links.add(link)
        self._expected_proof = b""
        self.done = False
        loop = asyncio.get_running_loop()
        self._timeout = loop.call_later(HANDSHAKE_TIMEOUT_S, link.time_out)

    def receive(self, kind: int, body: bytes) -> bool:
        """Handle one frame. True: the handshake is complete. Raises `ProtocolError`."""
        if self._expected_proof:
            if kind != PROOF:
                raise ProtocolError(f"a frame of kind {kind} before the proof of the secret")
            check_proof(body, self._expected_proof, "the client")
        elif self._answer_hello(kind, body):
            return False
        self.on_lost()
        self._link.accept_large_frames()
        self.done = True
        return True

    def on_lost(self) -> None:
        """Stop the timeout because the connection was closed or the handshake is complete."""
        self._timeout.cancel()
        self._unproven_links.discard(self._link)

    def _answer_hello(self, kind: int, body: bytes) -> bool:
        """Answer a hello. True: the client must still send its proof."""
        hello = decode_hello(kind, body, self._plane)
        nonce = new_nonce(self._secret)
        covered = self._plane, hello.nonce, nonce, self._incarnation
        proof = b""
        if nonce and len(hello.nonce) == NONCE_BYTES:
            proof = compute_proof(self._secret, "listener", *covered)
        self._link.write(pack_hello(self._plane, self._incarnation, nonce=nonce, proof=proof))
        try:
            check_version(hello)
        except ProtocolError:
            self._link.flush()  # lets a peer of another version report this version
            raise
        if not nonce:
            return False
        if not proof:
            self._link.flush()  # lets a peer without a secret report that one is required
            raise ProtocolError("the client has no secret")
        self._expected_proof = compute_proof(self._secret, "dialler", *covered)
        return True
