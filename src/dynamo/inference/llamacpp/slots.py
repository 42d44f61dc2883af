"""Choice of llama.cpp's slots. A slot holds the KV of one sequence, and reuses its prefix."""

from __future__ import annotations

import msgspec


class Slot(msgspec.Struct, eq=False):
    """A sequence of the server. `tokens`: the ids whose KV the slot holds, of prompt and answer.

    `salt`: hash root of those tokens. `used_at`: number of the slot's last reservation.
    """

    number: int
    tokens: list[int] = []
    salt: str = ""
    used_at: int = 0
    busy: bool = False


class Slots:
    """The slots of one server. The engine names a slot for each request, so that the prefix of one
    tenant never serves another, and so that what a slot holds is known here."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(number) for number in range(count)]
        self._reservations = 0

    def reserve(self, prompt: tuple[int, ...], salt: str) -> tuple[Slot, int]:
        """Reserve a free slot and return it with the length of the prefix that it may reuse.

        A slot whose tokens the prompt mostly continues is preferred, then the one unused for the
        longest time. A slot must be free.
        """
        free = [slot for slot in self._slots if not slot.busy]
        matches = [(common_prefix(slot.tokens, prompt), slot) for slot in free if slot.salt == salt]
        continued = [match for match in matches if match[0] * 2 >= max(1, len(match[1].tokens))]
        if continued:
            reusable, slot = max(continued, key=lambda match: (match[0], match[1].used_at))
        else:
            slot = min(free, key=lambda slot: slot.used_at)
            reusable = common_prefix(slot.tokens, prompt) if slot.salt == salt else 0
        self._reservations += 1
        slot.used_at = self._reservations
        slot.busy = True
        slot.salt = salt
        slot.tokens = list(prompt[:reusable])
        return slot, reusable

    def clear(self, block_tokens: int) -> int:
        """Forget the tokens of the free slots, and return how many blocks these were."""
        before = self.count_blocks(block_tokens)
        for slot in self._slots:
            if not slot.busy:
                slot.tokens = []
        return before - self.count_blocks(block_tokens)

    def count_blocks(self, block_tokens: int, *, busy: bool = False) -> int:
        """Count the blocks of all slots, partly filled ones too, or only of those in use."""
        return sum(
            -(-len(slot.tokens) // block_tokens) for slot in self._slots if slot.busy or not busy
        )


def common_prefix(tokens: list[int], prompt: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    limit = min(len(tokens), len(prompt))
    if tuple(tokens[:limit]) == prompt[:limit]:
        return limit
    return next(index for index in range(limit) if tokens[index] != prompt[index])
