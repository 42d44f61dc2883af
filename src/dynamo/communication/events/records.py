"""How subscribers find sources: `/_events/{subject}/{publisher}/{epoch}` in the directory."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

import msgspec

KEY_ROOT: Final = "/_events/"


class SourceRecord(msgspec.Struct, frozen=True):
    """Where a source is published, and its number there. Unknown fields are ignored."""

    address: str
    number: int


class SourceKey(msgspec.Struct, frozen=True):
    """Whose source it is. A subject may hold slashes; a greater epoch replaces a smaller one."""

    subject: str
    publisher: str
    epoch: int

    def __str__(self) -> str:
        return f"{KEY_ROOT}{self.subject}/{quote(self.publisher, safe='')}/{self.epoch}"


def parse_key(key: str) -> SourceKey:
    """Raises `ValueError` for another kind of key."""
    subject, publisher, epoch = key.removeprefix(KEY_ROOT).rsplit("/", 2)
    return SourceKey(subject, unquote(publisher), int(epoch))


_decode = msgspec.json.Decoder(SourceRecord).decode


def parse_record(value: bytes) -> SourceRecord:
    """Raises `msgspec.DecodeError`."""
    return _decode(value)


def encode_record(record: SourceRecord) -> bytes:
    """As JSON."""
    return msgspec.json.encode(record)
