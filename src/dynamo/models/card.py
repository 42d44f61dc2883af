"""Model cards: descriptions of models that workers publish and frontends read."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.core.hashing import HASH_SCHEME
from dynamo.core.values import EngineInfo
from dynamo.models.file_cache import FileRef


class ModelCard(msgspec.Struct, frozen=True):
    """Description of a served model. `names`: its id, then aliases. `created`: Unix time.

    `generation`: the model's own defaults (temperature, top_p, top_k, max_new_tokens, ...).
    `hashing`: the scheme of the hashes of its KV blocks. `tool_format`: the family whose tool calls
    it writes; empty: the family of its chat template. `tool_template`: the chat template for
    requests with tools, if there is another one. `special_tokens`: texts of special tokens by the
    names that templates use, besides BOS and EOS. `tokenizer` is None for a model that only
    servers by their URL know, which get conversations as text.
    """

    names: tuple[str, ...]
    context_tokens: int
    vocab_size: int
    tokenizer: FileRef | None
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
    tool_format: str = ""
    tool_template: str | None = None
    special_tokens: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The id under which the model is listed."""
        return self.names[0]

    @property
    def tokenizer_file(self) -> FileRef:
        """The tokenizer. Raises `ModelUnavailable` for a model without one."""
        if self.tokenizer is None:
            raise ModelUnavailable(f"{self.name} has no tokenizer here")
        return self.tokenizer


class BlockIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties that processes with common hashes of KV blocks must share. None: unknown."""

    tokenizer: str | None = None
    block_tokens: int | None = None
    hashing: str | None = None

    def describe_differences(self, other: BlockIdentity) -> str:
        """Return a text on the known properties of `other` that differ; "" if none do."""
        own_values, other_values = map(msgspec.structs.astuple, (self, other))
        return ", ".join(
            f"{name.replace('_', ' ')} {theirs!r} instead of {ours!r}"
            for name, ours, theirs in zip(
                self.__struct_fields__, own_values, other_values, strict=True
            )
            if ours is not None and theirs is not None and ours != theirs
        )


def block_identity(card: ModelCard) -> BlockIdentity:
    """Return the block identity of a card's model."""
    tokenizer = "none" if card.tokenizer is None else card.tokenizer.sha256
    return BlockIdentity(tokenizer, card.block_tokens, card.hashing)
