"""The handshake at both ends of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dynamo.communication.frames import pack_frame
from dynamo.communication.handshake import (
    HANDSHAKE_S,
    NONCE_BYTES,
    PROOF,
    agree,
    check_proof,
    decode_hello,
    new_nonce,
    pack_hello,
    prove,
    read_hello,
)
from dynamo.communication.link import Link
from dynamo.core.errors import InstanceGone, ProtocolError

ASKED = "the other side asks for the deployment's secret (security.secret)"


class Greeting:
    """At the end of who dials. Its peer passes on what happens until the greeting is `over`."""

    def __init__(self, link: Link, plane: str, incarnation: str, secret: str = "") -> None:
        self._link = link
        self._plane = plane
        self._incarnation = incarnation
        self._secret = secret
        self._nonce = new_nonce(secret)
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        """It has ended, well or not."""
        return self._answer.done()

    async def connect(self, dial: Callable[[Link], Awaitable[None]]) -> None:
        """Dial and greet. Raises `OSError`, `TimeoutError`; `InstanceGone` where another
        incarnation answers, `ProtocolError` where no version or secret is shared. Nothing stays
        open then."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await dial(self._link)
                await self._answer
        except BaseException:
            self._answer.cancel()
            self._link.abort()
            raise

    def begin(self) -> None:
        """The connection stands: who dialled speaks first."""
        self._link.write(pack_hello(self._plane, nonce=self._nonce))

    def read(self, kind: int, body: bytes) -> None:
        """The first frame. Raises `ProtocolError`."""
        try:
            hello, _ = read_hello(kind, body, self._plane)
            self._exchange_proofs(hello.nonce, hello.proof)
        except ProtocolError as error:
            self._answer.set_exception(error)
            raise
        if hello.incarnation != self._incarnation:
            self._answer.set_exception(InstanceGone("another process answers there now"))
            self._link.abort()
            return
        self._link.greeted()
        self._answer.set_result(None)

    def lost(self) -> None:
        """The connection is closed."""
        if not self.over:
            why = "the connection closed during the handshake"
            self._answer.set_exception(InstanceGone(why))

    def _exchange_proofs(self, nonce: bytes, proof: bytes) -> None:
        """The listener's first, so that a false one gets nothing of ours."""
        if not self._secret:
            if nonce:
                raise ProtocolError(ASKED)
            return
        nonces = self._nonce, nonce
        wanted = prove(self._secret, "listener", self._plane, *nonces)
        check_proof(proof, wanted, "who listens there")
        own = prove(self._secret, "dialler", self._plane, *nonces)
        self._link.write(pack_frame(PROOF, own))


class Welcome:
    """At the end of who listens: `read` takes frames until it answers True, once. Whoever has not
    come so far in five seconds is cut off."""

    def __init__(self, link: Link, plane: str, incarnation: str, secret: str = "") -> None:
        self._link = link
        self._plane = plane
        self._incarnation = incarnation
        self._secret = secret
        self._wanted = b""
        self.done = False
        self._patience = asyncio.get_running_loop().call_later(HANDSHAKE_S, link.abort)

    def read(self, kind: int, body: bytes) -> bool:
        """Whether the handshake is done with this frame. Raises `ProtocolError`."""
        if self._wanted:
            if kind != PROOF:
                raise ProtocolError(f"a frame of kind {kind} before the proof of the secret")
            check_proof(body, self._wanted, "who dialled")
        elif self._answer(kind, body):
            return False
        self._patience.cancel()
        self._link.greeted()
        self.done = True
        return True

    def lost(self) -> None:
        """The connection is closed."""
        self._patience.cancel()

    def _answer(self, kind: int, body: bytes) -> bool:
        """Answer a hello; whether a proof must follow."""
        hello = decode_hello(kind, body, self._plane)
        nonce = new_nonce(self._secret)
        proof = b""
        if nonce and len(hello.nonce) == NONCE_BYTES:
            proof = prove(self._secret, "listener", self._plane, hello.nonce, nonce)
        self._link.write(pack_hello(self._plane, self._incarnation, nonce=nonce, proof=proof))
        try:
            agree(hello)
        except ProtocolError:
            self._link.flush()  # so that a peer of another version learns which one this is
            raise
        if not nonce:
            return False
        if not proof:
            self._link.flush()  # so that a peer without a secret learns that it needs one
            raise ProtocolError("who dialled has no secret")
        self._wanted = prove(self._secret, "dialler", self._plane, hello.nonce, nonce)
        return True
