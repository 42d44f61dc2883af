"""Encoders of text: Hugging Face's `tokenizers` (the reference) and the faster `fastokens`.

`fastokens` is about five times faster. A tokenizer uses it only if it returns exactly the
reference's ids. This is verified once for each tokenizer and pair of versions, in a separate
process (`verification.py`), and stored in the user's cache. A process loads only one library.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import InvalidRequest, ModelUnavailable
from dynamo.models.file_cache import (
    FileRef,
    cache_dir,
    file_lock,
    find_file,
    read_json,
    write_atomically,
)
from dynamo.models.tokenization.tokenizer_file import with_explicit_splits

log = logging.getLogger(__name__)

VERIFICATION_VERSION = 2
"""Increment it when corpus, splitting or loading change, so that older results are not used."""
_VERIFICATION_TIMEOUT_S = 300.0


class EncoderVerification(msgspec.Struct, frozen=True):
    """Stored result. `equal`: fastokens returns the reference's ids. `why`: the first difference.

    `cuts`: the segments of `TextSplitter` have the same ids as the whole text.
    """

    equal: bool
    cuts: bool
    texts: int = 0
    chars: int = 0
    reason: str = ""


class Encoder(ABC):
    """Encodes text to packed ids (little-endian u32). Thread-safe."""

    name: str
    _library: Any

    @abstractmethod
    def encode(self, text: str, parse_special: bool = True) -> bytes:
        """Return ids without added special tokens. Raises `InvalidRequest` for lone surrogates.

        `parse_special`: special tokens in the text are encoded as such, else as plain text.
        """

    @abstractmethod
    def encode_with_special_tokens(self, text: str) -> bytes:
        """Return ids with the special tokens that the tokenizer adds, such as BOS."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str: ...

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._library.id_to_token(token_id)
        return token


class ReferenceEncoder(Encoder):
    """Encodes with Hugging Face's `tokenizers`."""

    name = "tokenizers"

    def __init__(self, path: Path) -> None:
        import tokenizers

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # read there alone
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

    def _load_without_special(self) -> Any:
        """Return a second tokenizer, since the mode cannot change while other threads encode."""
        if self._library_without_special is None:
            plain = self._load()
            plain.encode_special_tokens = True
            self._library_without_special = plain
        return self._library_without_special

    @staticmethod
    def _encode_ids(library: Any, text: str, add_special_tokens: bool) -> bytes:
        try:
            # `encode` would hold the GIL, and `encode_batch` would compute offsets, too.
            (encoding,) = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_unicode_error() from error
        return _pack_ids(encoding.ids)


class FastEncoder(Encoder):
    """Encodes with `fastokens`."""

    name = "fastokens"

    def __init__(self, path: Path) -> None:
        import fastokens

        self._path = path

        def read(path: str) -> Any:
            return fastokens.Tokenizer.from_json_str(with_explicit_splits(Path(path).read_bytes()))

        self._library = _load_library(read, path)
        self._encode_batch_flat = self._library.encode_batch_flat

    def encode(self, text: str, parse_special: bool = True) -> bytes:
        try:
            return self.encode_without_fallback(text, parse_special)
        except UnicodeEncodeError as error:
            raise _not_unicode_error() from error
        except ValueError as error:  # a limit that the reference does not have
            log.warning(
                "text encoded by the reference encoder", extra={"fields": {"reason": str(error)}}
            )
            return self._reference.encode(text, parse_special)

    @cached_property
    def _reference(self) -> ReferenceEncoder:
        return ReferenceEncoder(self._path)

    def encode_without_fallback(self, text: str, parse_special: bool = True) -> bytes:
        """Encode with `fastokens` alone. Raises `ValueError` at its limits."""
        packed: bytes = self._encode_batch_flat([text], False, not parse_special)[0]
        return packed

    def encode_with_special_tokens(self, text: str) -> bytes:
        return _pack_ids(self._library.encode(text, add_special_tokens=True).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return str(self._library.decode(list(ids), skip_special))


def fastest_encoder(path: Path, verification: EncoderVerification | None) -> Encoder:
    """Return the fastest encoder for a tokenizer.json that its verification allows."""
    equal = verification is not None and verification.equal
    return FastEncoder(path) if equal else ReferenceEncoder(path)


def cached_verification(ref: FileRef) -> EncoderVerification | None:
    """Return the stored verification for the installed versions, or None."""
    return _read_verification(_verification_path(ref))


def verify_encoder(ref: FileRef) -> EncoderVerification:
    """Return the stored verification, or verify now. Raises `ModelUnavailable` without the file.

    Verification blocks for some seconds. A lock makes it run once for several processes.
    """
    cached = cached_verification(ref)
    if cached is not None:
        return cached
    path = find_file(ref)
    if path is None:
        raise ModelUnavailable(f"{ref.name} is not on this host")
    target = _verification_path(ref)
    with file_lock(target.with_suffix(".lock")):
        return cached_verification(ref) or _run_verification(path, target)


def _run_verification(tokenizer: Path, target: Path) -> EncoderVerification:
    module = "dynamo.models.tokenization.verification"
    command = [sys.executable, "-m", module, str(tokenizer), str(target)]
    log.info("verifying the encoder", extra={"fields": {"tokenizer": str(tokenizer)}})
    try:
        ended = subprocess.run(  # noqa: S603 (our own module)
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERIFICATION_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return EncoderVerification(equal=False, cuts=False, reason="the verification took too long")
    if (verification := _read_verification(target)) is not None:
        return verification
    code, stderr = ended.returncode, ended.stderr.decode(errors="replace").strip()[-500:]
    log.warning("verification failed", extra={"fields": {"code": code, "stderr": stderr}})
    failed = EncoderVerification(
        equal=False, cuts=False, reason=f"the verification ended with {code}"
    )
    if code < 0:  # an encoder crashed: store the result, so that it is not repeated
        write_atomically(target, msgspec.json.encode(failed))
    return failed


def _read_verification(path: Path) -> EncoderVerification | None:
    try:
        return read_json(path, EncoderVerification)
    except ModelUnavailable:
        return None


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
        library = read(str(path))
        if hasattr(library, "no_padding"):  # prompts are neither padded nor cut
            library.no_padding()
            library.no_truncation()
        return library
    except Exception as error:
        raise ModelUnavailable(f"the tokenizer {path} cannot be read: {error}") from error


def _pack_ids(ids: Sequence[int]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _not_unicode_error() -> InvalidRequest:
    return InvalidRequest("the text contains half of a surrogate pair, which is not Unicode")
