"""From what a user wrote (nothing, a folder, a file, a hub name) to a model's files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import msgspec

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.values import EngineInfo
from dynamo.models import download, hub
from dynamo.models.card import ModelCard
from dynamo.models.encoders import prove, verdict
from dynamo.models.files import FileRef, Progress, file_ref, no_progress
from dynamo.models.gguf import GgufFile
from dynamo.models.gguf_tokenizer import tokenizer_json
from dynamo.models.location import check_folder, locate
from dynamo.models.origin import ModelFacts, facts_of_folder, facts_of_gguf
from dynamo.models.weights import Weights, open_weights


class ModelFiles(msgspec.Struct, frozen=True):
    """One model on this host. `path`: the GGUF file or the folder; `tokenizer`: a tokenizer.json
    (for GGUF a converted one, in the user's cache)."""

    path: Path
    name: str
    tokenizer: FileRef
    facts: ModelFacts
    source: str = ""

    def open_weights(self) -> Weights:
        """The weights, mapped and read when asked for. Raises ModelUnavailable."""
        return open_weights(self.path)

    def card(
        self,
        *,
        names: Sequence[str] = (),
        context_tokens: int = 0,
        block_tokens: int = 16,
        engine: EngineInfo | None = None,
        created: int | None = None,
    ) -> ModelCard:
        """The model's card. `names` and `context_tokens` replace what the model says of itself."""
        facts = self.facts
        return ModelCard(
            names=tuple(names) or (self.name,),
            context_tokens=context_tokens or facts.context_tokens,
            vocab_size=facts.vocab_size,
            tokenizer=self.tokenizer,
            block_tokens=block_tokens,
            eos_token_ids=facts.eos_token_ids,
            bos_token=facts.bos_token,
            eos_token=facts.eos_token,
            chat_template=facts.chat_template,
            generation=msgspec.to_builtins(facts.generation),
            created=int(time.time()) if created is None else created,
            engine=engine,
            source=self.source,
        )


async def resolve_model(
    spec: str = "",
    progress: Progress = no_progress,
    *,
    with_weights: bool = True,
    proven: bool = True,
    clock: Clock | None = None,
) -> ModelFiles:
    """Find or fetch a model, off the loop. `spec`: "" for the default model, a GGUF file, a folder
    in Hugging Face's layout, or a hub name. `proven`: also prove its encoder (once, seconds).

    Cancelling it ends a download. Raises ModelUnavailable with what to do.
    """
    stopped = Event()
    try:
        return await (clock or SystemClock()).offload(
            find_model, spec, progress, with_weights=with_weights, proven=proven, stopped=stopped
        )
    except asyncio.CancelledError:
        stopped.set()
        raise


def find_model(
    spec: str = "",
    progress: Progress = no_progress,
    *,
    with_weights: bool = True,
    proven: bool = True,
    stopped: Event | None = None,
) -> ModelFiles:
    """`resolve_model`, blocking."""
    found = _find(spec, progress, with_weights, stopped)
    halted = stopped is not None and stopped.is_set()
    if proven and not halted and verdict(found.tokenizer) is None:
        progress("proving the tokenizer's fast encoder", 0, 0)
        prove(found.tokenizer)
    return found


def _find(spec: str, progress: Progress, with_weights: bool, stopped: Event | None) -> ModelFiles:
    at = locate(spec)
    if at.place == "default":
        path = at.path or download.fetch(download.DEFAULT_MODEL, progress, stopped)
    else:
        path = at.path or hub.fetch(at.name, with_weights)
    make = _gguf if path.is_file() else _folder
    return make(path, at.name, at.source)


def _gguf(path: Path, name: str, source: str) -> ModelFiles:
    with GgufFile(path) as file:
        tokenizer = file_ref(tokenizer_json(file))
        return ModelFiles(path.resolve(), name, tokenizer, facts_of_gguf(file), source)


def _folder(path: Path, name: str, source: str) -> ModelFiles:
    check_folder(path)
    tokenizer = file_ref(path / "tokenizer.json")
    return ModelFiles(path.resolve(), name, tokenizer, facts_of_folder(path), source)
