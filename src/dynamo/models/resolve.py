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
from dynamo.models.card import ModelCard
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.checkpoint.weights import ModelWeights, open_weights
from dynamo.models.downloads import default_model, hub
from dynamo.models.file_cache import FileRef, ProgressCallback, file_ref, ignore_progress
from dynamo.models.location import check_model_folder, locate_model
from dynamo.models.metadata import ModelMetadata, metadata_from_folder, metadata_from_gguf
from dynamo.models.tokenization.encoders import cached_verification, verify_encoder
from dynamo.models.tokenization.gguf_tokenizer import converted_tokenizer_json


class ModelFiles(msgspec.Struct, frozen=True):
    """One model on this host. `path`: the GGUF file or the folder; `tokenizer`: a tokenizer.json
    (for GGUF a converted one, in the user's cache)."""

    path: Path
    name: str
    tokenizer: FileRef
    metadata: ModelMetadata
    source: str = ""

    def open_weights(self) -> ModelWeights:
        """The weights, mapped and read when asked for. Raises ModelUnavailable."""
        return open_weights(self.path)

    def build_card(
        self,
        *,
        names: Sequence[str] = (),
        context_tokens: int = 0,
        block_tokens: int = 16,
        engine: EngineInfo | None = None,
        created: int | None = None,
    ) -> ModelCard:
        """The model's card. `names` and `context_tokens` replace what the model says of itself."""
        facts = self.metadata
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
    progress: ProgressCallback = ignore_progress,
    *,
    with_weights: bool = True,
    ensure_verified: bool = True,
    clock: Clock | None = None,
) -> ModelFiles:
    """Find or fetch a model, off the loop. `spec`: "" for the default model, a GGUF file, a folder
    in Hugging Face's layout, or a hub name. `proven`: also prove its encoder (once, seconds).

    Cancelling it ends a download. Raises ModelUnavailable with what to do.
    """
    stopped = Event()
    try:
        return await (clock or SystemClock()).offload(
            resolve_model_blocking,
            spec,
            progress,
            with_weights=with_weights,
            ensure_verified=ensure_verified,
            stopped=stopped,
        )
    except asyncio.CancelledError:
        stopped.set()
        raise


def resolve_model_blocking(
    spec: str = "",
    progress: ProgressCallback = ignore_progress,
    *,
    with_weights: bool = True,
    ensure_verified: bool = True,
    stopped: Event | None = None,
) -> ModelFiles:
    """`resolve_model`, blocking."""
    found = _locate_and_fetch(spec, progress, with_weights, stopped)
    halted = stopped is not None and stopped.is_set()
    if ensure_verified and not halted and cached_verification(found.tokenizer) is None:
        progress("proving the tokenizer's fast encoder", 0, 0)
        verify_encoder(found.tokenizer)
    return found


def _locate_and_fetch(
    spec: str, progress: ProgressCallback, with_weights: bool, stopped: Event | None
) -> ModelFiles:
    at = locate_model(spec)
    if at.kind == "default":
        path = at.path or default_model.fetch_default_model(
            default_model.DEFAULT_MODEL, progress, stopped
        )
    else:
        path = at.path or hub.fetch_hub_model(at.name, with_weights)
    make = _files_from_gguf if path.is_file() else _files_from_folder
    return make(path, at.name, at.source)


def _files_from_gguf(path: Path, name: str, source: str) -> ModelFiles:
    with GgufFile(path) as file:
        tokenizer = file_ref(converted_tokenizer_json(file))
        return ModelFiles(path.resolve(), name, tokenizer, metadata_from_gguf(file), source)


def _files_from_folder(path: Path, name: str, source: str) -> ModelFiles:
    check_model_folder(path)
    tokenizer = file_ref(path / "tokenizer.json")
    return ModelFiles(path.resolve(), name, tokenizer, metadata_from_folder(path), source)
