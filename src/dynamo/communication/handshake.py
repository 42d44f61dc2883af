"""The first frames on every connection: who speaks, which protocol, and that both know the secret.

dialler -> listener: HELLO, then PROOF where there is a secret | listener -> dialler: HELLO. Each
proves the secret by an HMAC over both nonces; it never crosses itself. N talks to N-1.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from dynamo.communication.frames import HELLO, pack_frame
from dynamo.communication.link import Link
from dynamo.core.errors import InstanceGone, ProtocolError

VERSION: Final = 1
MIN_VERSION: Final = 1
HANDSHAKE_TIMEOUT_S: Final = 5.0
MAGIC: Final = "dynamo"
PROOF: Final = 255
NONCE_BYTES: Final = 16


class Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    """`version` and `oldest`: the range that the speaker understands. `incarnation`: the
    listener's, new for every process. `nonce`: the speaker has a secret; `proof`: the listener
    knows it. Unknown fields are ignored."""

    plane: str
    magic: str = ""
    version: int = VERSION
    oldest: int = MIN_VERSION
    incarnation: str = ""
    nonce: bytes = b""
    proof: bytes = b""


_decode = msgspec.msgpack.Decoder(Hello).decode


def pack_hello(
    plane: str, incarnation: str = "", *, nonce: bytes = b"", proof: bytes = b""
) -> bytes:
    """The frame that both ends send first."""
    hello = Hello(plane, MAGIC, incarnation=incarnation, nonce=nonce, proof=proof)
    return pack_frame(HELLO, msgspec.msgpack.encode(hello))


def decode_hello(kind: int, body: bytes, plane: str) -> Hello:
    """The peer's hello, whatever its version. Raises `ProtocolError` for anything else."""
    if kind != HELLO:
        raise ProtocolError(f"the first frame is of kind {kind}, not a hello")
    try:
        hello = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"unreadable hello: {error}") from error
    if hello.magic != MAGIC or hello.plane != plane:
        raise ProtocolError(f"a hello of plane {hello.plane!r} at a {plane!r} port")
    return hello


def negotiate_version(hello: Hello) -> int:
    """The version to speak. Raises `ProtocolError`."""
    agreed = min(VERSION, hello.version)
    if agreed < max(MIN_VERSION, hello.oldest):
        raise ProtocolError(
            f"the peer speaks protocol {hello.oldest} to {hello.version}, "
            f"this process {MIN_VERSION} to {VERSION}"
        )
    return agreed


def read_hello(kind: int, body: bytes, plane: str) -> tuple[Hello, int]:
    """The peer's hello and the version to speak. Raises `ProtocolError`."""
    hello = decode_hello(kind, body, plane)
    return hello, negotiate_version(hello)


def new_nonce(secret: str) -> bytes:
    """One for this connection; none where there is no secret to prove."""
    return secrets.token_bytes(NONCE_BYTES) if secret else b""


def compute_proof(secret: str, end: str, plane: str, dialler: bytes, listener: bytes) -> bytes:
    """That `end` ("dialler", "listener") knows the secret: HMAC-SHA256 over both nonces."""
    said = b"\0".join((end.encode(), plane.encode(), dialler + listener))
    return hmac.digest(secret.encode(), said, "sha256")


def check_proof(given: bytes, wanted: bytes, who: str) -> None:
    """Raises `ProtocolError`."""
    if not hmac.compare_digest(given, wanted):
        raise ProtocolError(f"{who} does not know this deployment's secret (security.secret)")


NEEDS_SECRET = "the other side asks for the deployment's secret (security.secret)"  # noqa: S105


class ClientHandshake:
    """At the end of who dials. Its peer passes on what happens until the greeting is `over`."""

    def __init__(self, link: Link, plane: str, incarnation: str, secret: str = "") -> None:
        self._link = link
        self._plane = plane
        self._incarnation = incarnation
        self._secret = secret
        self._nonce = new_nonce(secret)
        self._completion: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def done(self) -> bool:
        """It has ended, well or not."""
        return self._completion.done()

    async def connect(self, dial: Callable[[Link], Awaitable[None]]) -> None:
        """Dial and greet. Raises `OSError`, `TimeoutError`; `InstanceGone` where another
        incarnation answers, `ProtocolError` where no version or secret is shared. Nothing stays
        open then."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await dial(self._link)
                await self._completion
        except BaseException:
            self._completion.cancel()
            self._link.abort()
            raise

    def send_hello(self) -> None:
        """The connection stands: who dialled speaks first."""
        self._link.write(pack_hello(self._plane, nonce=self._nonce))

    def receive(self, kind: int, body: bytes) -> None:
        """The first frame. Raises `ProtocolError`."""
        try:
            hello, _ = read_hello(kind, body, self._plane)
            self._exchange_proofs(hello.nonce, hello.proof)
        except ProtocolError as error:
            self._completion.set_exception(error)
            raise
        if hello.incarnation != self._incarnation:
            self._completion.set_exception(InstanceGone("another process answers there now"))
            self._link.abort()
            return
        self._link.accept_large_frames()
        self._completion.set_result(None)

    def on_lost(self) -> None:
        """The connection is closed."""
        if not self.done:
            why = "the connection closed during the handshake"
            self._completion.set_exception(InstanceGone(why))

    def _exchange_proofs(self, nonce: bytes, proof: bytes) -> None:
        """The listener's first, so that a false one gets nothing of ours."""
        if not self._secret:
            if nonce:
                raise ProtocolError(NEEDS_SECRET)
            return
        nonces = self._nonce, nonce
        wanted = compute_proof(self._secret, "listener", self._plane, *nonces)
        check_proof(proof, wanted, "who listens there")
        own = compute_proof(self._secret, "dialler", self._plane, *nonces)
        self._link.write(pack_frame(PROOF, own))


class ServerHandshake:
    """At the end of who listens: `read` takes frames until it answers True, once. Whoever has not
    come so far in five seconds is cut off."""

    def __init__(self, link: Link, plane: str, incarnation: str, secret: str = "") -> None:
        self._link = link
        self._plane = plane
        self._incarnation = incarnation
        self._secret = secret
        self._expected_proof = b""
        self.done = False
        self._timeout = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, link.abort)

    def receive(self, kind: int, body: bytes) -> bool:
        """Whether the handshake is done with this frame. Raises `ProtocolError`."""
        if self._expected_proof:
            if kind != PROOF:
                raise ProtocolError(f"a frame of kind {kind} before the proof of the secret")
            check_proof(body, self._expected_proof, "who dialled")
        elif self._answer_hello(kind, body):
            return False
        self._timeout.cancel()
        self._link.accept_large_frames()
        self.done = True
        return True

    def on_lost(self) -> None:
        """The connection is closed."""
        self._timeout.cancel()

    def _answer_hello(self, kind: int, body: bytes) -> bool:
        """Answer a hello; whether a proof must follow."""
        hello = decode_hello(kind, body, self._plane)
        nonce = new_nonce(self._secret)
        proof = b""
        if nonce and len(hello.nonce) == NONCE_BYTES:
            proof = compute_proof(self._secret, "listener", self._plane, hello.nonce, nonce)
        self._link.write(pack_hello(self._plane, self._incarnation, nonce=nonce, proof=proof))
        try:
            negotiate_version(hello)
        except ProtocolError:
            self._link.flush()  # so that a peer of another version learns which one this is
            raise
        if not nonce:
            return False
        if not proof:
            self._link.flush()  # so that a peer without a secret learns that it needs one
            raise ProtocolError("who dialled has no secret")
        self._expected_proof = compute_proof(
            self._secret, "dialler", self._plane, hello.nonce, nonce
        )
        return True
