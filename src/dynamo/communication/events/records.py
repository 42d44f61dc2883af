"""Discovery records of event sources, at `/_events/{subject}/{publisher}/{epoch}`."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

import msgspec

KEY_ROOT: Final = "/_events/"


class SourceRecord(msgspec.Struct, frozen=True):
    """Address of a source's process and the source's number there. Unknown fields are ignored."""

    address: str
    number: int


class SourceKey(msgspec.Struct, frozen=True):
    """Identifies a source. Subjects may contain slashes. A greater epoch replaces a smaller one."""

    subject: str
    publisher: str
    epoch: int

    def __str__(self) -> str:
        return f"{KEY_ROOT}{self.subject}/{quote(self.publisher, safe='')}/{self.epoch}"


def parse_key(key: str) -> SourceKey:
    """Parse a key of the directory. Raises `ValueError`."""
    subject, publisher, epoch = key.removeprefix(KEY_ROOT).rsplit("/", 2)
    return SourceKey(subject, unquote(publisher), int(epoch))


parse_record = msgspec.json.Decoder(SourceRecord).decode
