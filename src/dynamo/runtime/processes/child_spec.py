"""The description of a supervised child process."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from dynamo.core.settings import Settings


class MemoryNeed(msgspec.Struct, frozen=True):
    """The memory of a process: its own, and what it shares with others of the same `shared_key`."""

    own_bytes: int = 0
    shared_bytes: int = 0
    shared_key: str = ""


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to keep alive. Processes with a lower `stop_order` stop first. With
    `needs_preparation` the process starts after the supervisor's preparation. `task` is what the
    role needs beside the settings. `cards` are the accelerators that the process may use; without
    any, its environment says which. `model` is the id of the model that a worker serves, "" if only
    its server knows it, and `embeds` whether that computes vectors. A `standby` process takes the
    place of another one that dies. `command` replaces `dynamo _child ROLE` and gets the same
    standard input."""

    role: str
    name: str
    settings: Settings
    stop_order: int = 0
    needs_preparation: bool = False
    task: dict[str, Any] = {}
    cards: tuple[str, ...] = ()
    model: str = ""
    command: tuple[str, ...] = ()
    standby: bool = False
    embeds: bool = False
    memory: MemoryNeed = MemoryNeed()

    @property
    def on_demand(self) -> bool:
        """Whether the process serves a model that is loaded when it is wanted."""
        return bool(self.model) and self.role == "worker" and self.settings.model.on_demand

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        return self.command or (sys.executable, "-P", "-m", "dynamo", "_child", self.role)
