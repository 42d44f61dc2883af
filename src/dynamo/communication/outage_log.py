"""Log lines about a server of a plane that cannot be reached, repeated while that lasts."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Final

log = logging.getLogger(__name__)

INTERVAL_S: Final = 5.0
LATER_INTERVAL_S: Final = 60.0
"""Interval between two lines once the outage has lasted longer than this."""


class OutageLog:
    """Logs which server is awaited and since when: at the first failure, then every `INTERVAL_S`.

    `server` names the kind of server, and `urls` the addresses without passwords.
    """

    def __init__(self, server: str, urls: str) -> None:
        self._server = server
        self._urls = urls
        self._began_s = self._logged_s = 0.0
        self._since = ""

    def begin(self) -> None:
        """Start to count an outage that is logged already."""
        self._began_s = self._logged_s = time.monotonic()
        self._since = datetime.now(UTC).isoformat(timespec="seconds")

    def end(self) -> None:
        """Record that a server was reached."""
        self._since = ""

    def report(self, error: str) -> None:
        """Log a failed attempt, unless one was logged within the interval."""
        now, first = time.monotonic(), not self._since
        if first:
            self.begin()
        waited_s = now - self._began_s
        interval_s = INTERVAL_S if waited_s < LATER_INTERVAL_S else LATER_INTERVAL_S
        if not first and now - self._logged_s < interval_s:
            return
        self._logged_s = now
        fields = {"server": self._urls, "since": self._since, "error": error}
        log.warning(
            "waiting for %s, which cannot be reached", self._server, extra={"fields": fields}
        )
