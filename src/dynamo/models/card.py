"""What a model is, for everybody who serves it: published by workers, read by frontends."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.core.hashing import HASH_SCHEME
from dynamo.core.values import EngineInfo
from dynamo.models.file_cache import FileRef


class ModelCard(msgspec.Struct, frozen=True):
    """One model. `names[0]` is its id, the rest are aliases; `created` is Unix time;
    `generation`: the model's own defaults (temperature, top_p, top_k, max_new_tokens, ...);
    `hashing`: how its KV blocks are named."""

    names: tuple[str, ...]
    context_tokens: int
    vocab_size: int
    tokenizer: FileRef
    block_tokens: int = 16
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str | None = None
    generation: dict[str, Any] = {}
    created: int = 0
    engine: EngineInfo | None = None
    source: str = ""
    hashing: str = HASH_SCHEME

    @property
    def name(self) -> str:
        """The id under which it is listed."""
        return self.names[0]


class BlockIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What two processes must have in common for the same prompt to have the same KV blocks.
    None: not told."""

    tokenizer: str | None = None
    block_tokens: int | None = None
    hashing: str | None = None

    def describe_differences(self, other: BlockIdentity) -> str:
        """What `other` has that is different, in words; "" where nothing is."""
        pairs = zip(
            self.__struct_fields__, self._field_values(), other._field_values(), strict=True
        )
        return ", ".join(
            f"{name.replace('_', ' ')} {theirs!r} instead of {ours!r}"
            for name, ours, theirs in pairs
            if ours is not None and theirs is not None and ours != theirs
        )

    def _field_values(self) -> tuple[Any, ...]:
        return msgspec.structs.astuple(self)


def block_identity(card: ModelCard) -> BlockIdentity:
    """Of the blocks of a card's model."""
    return BlockIdentity(card.tokenizer.sha256, card.block_tokens, card.hashing)
