"""The health of a process: named reasons for being unhealthy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynamo.core.redaction import redact

PREPARATION_REASON = "preparation"
"""The name of the reason while the deployment downloads its model."""


class ProcessHealth:
    """Holds reasons that components set and clear, and checks that run at every read."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._checks: dict[str, Callable[[], str]] = {}
        self._limitations: dict[str, Callable[[], str]] = {}
        self._listeners: list[Callable[[], None]] = []

    def set_unhealthy(self, name: str, reason: str) -> None:
        """Set or replace the reason under `name`."""
        changed = self._reasons.get(name) != reason
        self._reasons[name] = reason
        if changed:
            self._notify()

    def set_healthy(self, name: str) -> None:
        """Clear the reason under `name`."""
        if self._reasons.pop(name, None) is not None:
            self._notify()

    def add_check(self, name: str, check: Callable[[], str]) -> None:
        """Call `check()` at every read; it returns a reason, or "" when healthy. A changed result
        does not call the listeners."""
        self._checks[name] = check

    def remove(self, name: str) -> None:
        """Drop the reason and the check under `name`."""
        self._checks.pop(name, None)
        self.set_healthy(name)

    def add_limitation(self, name: str, check: Callable[[], str]) -> None:
        """Call `check()` at every read; it says what does not work while the process serves on, or
        "" when all does."""
        self._limitations[name] = check

    @property
    def limitations(self) -> Mapping[str, str]:
        """Every present limitation by name."""
        limitations = {name: check() for name, check in self._limitations.items()}
        return {name: redact(text) for name, text in limitations.items() if text}

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a reason is set, changed or cleared."""
        self._listeners.append(listener)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Every present reason by name."""
        checked = {name: reason for name, check in self._checks.items() if (reason := check())}
        return {name: redact(reason) for name, reason in (self._reasons | checked).items()}

    @property
    def healthy(self) -> bool:
        """Whether there is no reason to be unhealthy."""
        return not self.reasons

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
