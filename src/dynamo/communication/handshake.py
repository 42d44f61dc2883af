"""The first frames on every connection: who speaks, which protocol, and that both know the secret.

dialler -> listener: HELLO, then PROOF where there is a secret | listener -> dialler: HELLO. Each
proves the secret by an HMAC over both nonces; it never crosses itself. N talks to N-1.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

import msgspec

from dynamo.communication.frames import HELLO, pack_frame
from dynamo.core.errors import ProtocolError

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
