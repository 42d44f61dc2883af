"""Where one message reaches all followers: what such a carrier must do for the event plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Broadcast(Protocol):
    """By subject, and the publishing process and number of each source. May lose, never reorders
    what one source says."""

    def send(self, subject: str, number: int, frames: Sequence[bytes], last: int) -> None:
        """New events of one of this process's sources; the last one's sequence."""

    def send_end(self, subject: str, number: int, frame: bytes) -> None:
        """A source's last word."""

    def subscribe(
        self, subject: str, incarnation: str, number: int, take: Callable[[bytes], None]
    ) -> Callable[[], None]:
        """Call `take` with each frame of a source. Returns the way to stop that."""
