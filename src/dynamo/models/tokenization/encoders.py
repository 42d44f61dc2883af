"""Text to ids by the fastest encoder that is proven to give exactly the reference's ids.

The reference is Hugging Face's `tokenizers`; `fastokens` is some five times faster. Equality is
proven once for each tokenizer and pair of versions, in a process of its own (`proof.py`), and
remembered in the user's cache. Until then, or when they differ, `tokenizers` encodes. A process
loads one of the two, never both.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import InvalidRequest, ModelUnavailable
from dynamo.models.file_cache import FileRef, cache_dir, file_lock, find_file, write_atomically

log = logging.getLogger(__name__)

VERIFICATION_VERSION = 1
"""Raised whenever the corpus or the rule of cutting changes: older proofs then do not count."""
_VERIFICATION_TIMEOUT_S = 300.0


class EncoderVerification(msgspec.Struct, frozen=True):
    """What the proof found. `equal`: fastokens gives the reference's ids; `cuts`: pieces cut by
    `segments.Splitter` give the ids of the whole."""

    equal: bool
    cuts: bool
    texts: int = 0
    chars: int = 0
    why: str = ""


class Encoder(ABC):
    """Text to packed ids (little-endian u32). Safe to use from several threads."""

    name: str

    @abstractmethod
    def encode(self, text: str, parse_special: bool = True) -> bytes:
        """Ids without any frame; special tokens in the text are read as such, or as plain text.

        Raises InvalidRequest for text that is not Unicode (a lone surrogate).
        """

    @abstractmethod
    def encode_with_special_tokens(self, text: str) -> bytes:
        """Ids with what the tokenizer puts around a text (a first BOS, usually nothing)."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str: ...

    @abstractmethod
    def id_to_token(self, token_id: int) -> str | None: ...


class ReferenceEncoder(Encoder):
    """Hugging Face's `tokenizers`."""

    name = "tokenizers"

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._load: Callable[[], Any] = partial(_load_library, tokenizers.Tokenizer.from_file, path)
        self._library = self._load()
        self._library_without_special: Any = None

    def encode(self, text: str, parse_special: bool = True) -> bytes:
        library = self._library if parse_special else self._load_without_special()
        return self._encode_ids(library, text, add_special_tokens=False)

    def encode_with_special_tokens(self, text: str) -> bytes:
        return self._encode_ids(self._library, text, add_special_tokens=True)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return str(self._library.decode(ids, skip_special_tokens=skip_special))

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._library.id_to_token(token_id)
        return token

    def _load_without_special(self) -> Any:
        """A second one, made when first needed: the switch cannot be turned while others encode."""
        if self._library_without_special is None:
            plain = self._load()
            plain.encode_special_tokens = True
            self._library_without_special = plain
        return self._library_without_special

    @staticmethod
    def _encode_ids(library: Any, text: str, add_special_tokens: bool) -> bytes:
        try:
            found = library.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_unicode_error() from error
        return _pack_ids(found.ids)


class FastEncoder(Encoder):
    """`fastokens`."""

    name = "fastokens"

    def __init__(self, path: Path) -> None:
        import fastokens

        self._path = path
        self._library = _load_library(fastokens.Tokenizer.from_file, path)
        self._encode_batch_flat = self._library.encode_batch_flat

    def encode(self, text: str, parse_special: bool = True) -> bytes:
        try:
            return self.encode_without_fallback(text, parse_special)
        except UnicodeEncodeError as error:
            raise _not_unicode_error() from error
        except ValueError as error:  # a limit of its own; the reference has none
            log.warning("text encoded by the reference", extra={"fields": {"why": str(error)}})
            return ReferenceEncoder(self._path).encode(text, parse_special)

    def encode_without_fallback(self, text: str, parse_special: bool = True) -> bytes:
        """`encode` by this library alone. Raises ValueError where it has a limit."""
        packed: bytes = self._encode_batch_flat([text], False, not parse_special)[0]
        return packed

    def encode_with_special_tokens(self, text: str) -> bytes:
        return _pack_ids(self._library.encode(text, add_special_tokens=True).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return str(self._library.decode(list(ids), skip_special))

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._library.id_to_token(token_id)
        return token


def fastest_encoder(path: Path, found: EncoderVerification | None) -> Encoder:
    """The fastest encoder for a tokenizer.json that `found` allows."""
    return FastEncoder(path) if found is not None and found.equal else ReferenceEncoder(path)


def cached_verification(ref: FileRef) -> EncoderVerification | None:
    """What was proven of this tokenizer under the installed versions; None: nothing yet."""
    try:
        return msgspec.json.decode(_verification_path(ref).read_bytes(), type=EncoderVerification)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def verify_encoder(ref: FileRef) -> EncoderVerification:
    """The verdict, after making the proof if there is none: some seconds of CPU in a process of
    low priority. Blocks; several processes prove once. Raises ModelUnavailable without the file."""
    known = cached_verification(ref)
    if known is not None:
        return known
    path = find_file(ref)
    if path is None:
        raise ModelUnavailable(f"{ref.name} is not on this host")
    target = _verification_path(ref)
    with file_lock(target.with_suffix(".lock")):
        return cached_verification(ref) or _run_verification(path, target)


def _run_verification(tokenizer: Path, target: Path) -> EncoderVerification:
    command = [
        sys.executable,
        "-m",
        "dynamo.models.tokenization.verification",
        str(tokenizer),
        str(target),
    ]
    log.info("proving the encoder", extra={"fields": {"tokenizer": str(tokenizer)}})
    try:
        ended = subprocess.run(  # noqa: S603 (our own module)
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERIFICATION_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return EncoderVerification(equal=False, cuts=False, why="the proof took too long")
    try:
        return msgspec.json.decode(target.read_bytes(), type=EncoderVerification)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        why = ended.stderr.decode(errors="replace").strip()[-500:]
        found = EncoderVerification(
            equal=False, cuts=False, why=f"the proof ended with {ended.returncode}"
        )
        log.warning("proof failed", extra={"fields": {"code": ended.returncode, "stderr": why}})
        if ended.returncode < 0:  # an encoder crashed: remember, so that nobody tries again
            write_atomically(target, msgspec.json.encode(found))
        return found


def _verification_path(ref: FileRef) -> Path:
    versions = "-".join(f"{name}{_package_version(name)}" for name in ("fastokens", "tokenizers"))
    return cache_dir("encoders") / f"{ref.sha256[:32]}-{versions}-r{VERIFICATION_VERSION}.json"


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "0"


def _load_library(read: Callable[[str], Any], path: Path) -> Any:
    try:
        return read(str(path))
    except Exception as error:
        raise ModelUnavailable(f"the tokenizer {path} cannot be read: {error}") from error


def _pack_ids(ids: Sequence[int]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _not_unicode_error() -> InvalidRequest:
    return InvalidRequest("the text holds half of a surrogate pair, which is not Unicode")
