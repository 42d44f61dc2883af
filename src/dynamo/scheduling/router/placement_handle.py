"""The handle of a placed request."""

from __future__ import annotations

from collections.abc import Sequence


class Placement:
    """The handle by which the router reports the progress of a placed request to its policy.

    The number of emitted tokens is read from the request's token log, so that a token costs no
    call.
    """

    __slots__ = ("_offset", "_token_log")

    def __init__(self) -> None:
        self._offset = 0
        self._token_log: Sequence[int] = ()

    @property
    def emitted(self) -> int:
        """Tokens that the worker has sent so far."""
        return self._offset + len(self._token_log)

    @emitted.setter
    def emitted(self, count: int) -> None:
        self._offset = count - len(self._token_log)

    def attach_token_log(self, token_log: Sequence[int]) -> None:
        """Count the tokens that are appended to `token_log` after this call."""
        self._offset, self._token_log = self.emitted - len(token_log), token_log

    def on_first_token(self) -> None:
        """Called once, before the first tokens are counted."""

    def end(self) -> None:
        """Called once, when the request has left its worker for any reason."""
