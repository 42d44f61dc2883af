"""Why a process is not well: reasons by name, none = well."""

from __future__ import annotations

from collections.abc import Callable, Mapping

PREPARATION_REASON = "preparation"
"""The reason's name while the deployment fetches its model."""


class ProcessHealth:
    """Reasons, set and taken back by whoever knows them, and checks asked when somebody looks."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._checks: dict[str, Callable[[], str]] = {}
        self._listeners: list[Callable[[], None]] = []

    def set_unhealthy(self, name: str, reason: str) -> None:
        """`name` is not well, and why."""
        changed = self._reasons.get(name) != reason
        self._reasons[name] = reason
        if changed:
            self._notify()

    def set_healthy(self, name: str) -> None:
        """`name` has nothing to say any more."""
        if self._reasons.pop(name, None) is not None:
            self._notify()

    def add_check(self, name: str, ask: Callable[[], str]) -> None:
        """Ask `ask()` at every look; it answers a reason, or "" when well. For what may break
        later: nobody is told when its answer changes."""
        self._checks[name] = ask

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a reason that was set comes, changes or goes."""
        self._listeners.append(listener)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Every present reason by name."""
        asked = {name: reason for name, ask in self._checks.items() if (reason := ask())}
        return self._reasons | asked

    @property
    def healthy(self) -> bool:
        """Nothing is wrong."""
        return not self.reasons

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
