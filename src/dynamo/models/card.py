"""What a model is, for everybody who serves it: published by workers, read by frontends."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.core.values import EngineInfo
from dynamo.models.files import FileRef


class ModelCard(msgspec.Struct, frozen=True):
    """One model. `names[0]` is its id, the rest are aliases; `created` is Unix time;
    `generation`: the model's own sampling defaults (temperature, top_p, top_k, ...)."""

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

    @property
    def name(self) -> str:
        """The id under which it is listed."""
        return self.names[0]
