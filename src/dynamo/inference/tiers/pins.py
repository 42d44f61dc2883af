"""`BlockPins`: the prompts whose blocks a tier does not evict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Final

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import InvalidRequest

PINNED_SHARE: Final = 2
"""The inverse of the share of a tier that pinned blocks may take."""


class PinnedPrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pin: its name, how many blocks its prompt has, how many of them the tier holds, and the
    seconds that are left; 0: without end."""

    pin: str
    blocks: int
    held: int
    ttl_s: float = 0.0


class BlockPins:
    """Pins of one tier, by the hashes of their blocks. A block that is not in the tier yet is
    pinned from its arrival on. A pin is named by its last block and ends with its time."""

    def __init__(self, capacity_blocks: int, clock: Clock) -> None:
        self.limit = capacity_blocks // PINNED_SHARE
        self._clock = clock
        self._prompts: dict[str, tuple[Sequence[int], float]] = {}
        self._uses: Counter[int] = Counter()
        self._next_end_s = inf

    def __contains__(self, block_hash: object) -> bool:
        self._end_old()
        return block_hash in self._uses

    def __len__(self) -> int:
        self._end_old()
        return len(self._uses)

    def prompts(self) -> dict[str, tuple[Sequence[int], float]]:
        """Return the hashes and the seconds left (0: without end) by pin."""
        self._end_old()
        now = self._clock.now()
        return {
            pin: (hashes, 0.0 if end_s == inf else end_s - now)
            for pin, (hashes, end_s) in self._prompts.items()
        }

    def add(self, hashes: Sequence[int], ttl_s: float = 0.0) -> str:
        """Pin the blocks of a prompt, for `ttl_s` seconds (0: without end), and return the pin's
        name. A prompt that is pinned already gets the new time. Raises `InvalidRequest`."""
        pinned = len(self) + sum(block_hash not in self._uses for block_hash in hashes)
        if pinned > self.limit:
            raise InvalidRequest(
                f"{pinned} blocks would be pinned, of which {len(hashes)} are of this prompt; the "
                f"tier pins {self.limit}, a half of its capacity",
                hint="end a pin with `dynamo kv unpin`, or give the tier more room",
            )
        pin = f"{hashes[-1]:016x}"
        self.remove(pin)
        self._prompts[pin] = hashes, (self._clock.now() + ttl_s if ttl_s else inf)
        self._uses.update(hashes)
        self._set_next_end()
        return pin

    def remove(self, pin: str) -> bool:
        """End a pin. Returns whether there was one."""
        hashes, _ = self._prompts.pop(pin, ((), 0.0))
        for block_hash in hashes:
            self._uses[block_hash] -= 1
            if not self._uses[block_hash]:
                del self._uses[block_hash]
        self._set_next_end()
        return bool(hashes)

    def _end_old(self) -> None:
        now = self._clock.now() if self._prompts else 0.0
        if now < self._next_end_s:
            return
        for pin in [pin for pin, (_, end_s) in self._prompts.items() if end_s <= now]:
            self.remove(pin)

    def _set_next_end(self) -> None:
        self._next_end_s = min((end_s for _, end_s in self._prompts.values()), default=inf)
