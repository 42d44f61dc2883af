"""Asks an OpenAI-compatible server for its kind, its model and its context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dynamo.communication.http.client import HttpAnswer, HttpClient
from dynamo.core.errors import (
    ConfigError,
    ModelUnavailable,
    NotFound,
    Overloaded,
    WorkerFailed,
    nearest_name_hint,
)
from dynamo.inference.openai_server.foreign_values import (
    decode_value,
    excerpt,
    read_count,
    read_object,
    read_objects,
    read_word,
)

Kind = Literal["vllm", "sglang", "llamacpp", "dynamo", "openai"]
"""The program behind a URL. "openai": any other one, which is given only what OpenAI documents."""
OWNERS: dict[str, Kind] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llamacpp",
    "dynamo": "dynamo",
}
"""`owned_by` of a model in /v1/models."""
PROBE_TEXT = "The 3 quick foxes don't wait:\n\tnaïve 犬 <|im_start|>"
"""Tokenised by the server and here. Different models differ in it."""
MAX_SLOTS = 1 << 16
KEY_HINT = "set engine.url_key_file, or DYNAMO_ENGINE__URL_KEY in the environment"


class RemoteModel(msgspec.Struct, frozen=True):
    """An entry of /v1/models, as far as servers agree. `context_tokens` is 0 where it says none."""

    id: str
    owned_by: str = ""
    root: str = ""
    context_tokens: int = 0


class ServerFacts(msgspec.Struct, frozen=True):
    """A server's kind and model. `context_tokens` and `slots` are 0 where it does not say."""

    kind: Kind
    model: RemoteModel
    context_tokens: int = 0
    slots: int = 0


CONTEXT_NAMES = ("max_model_len", "context_length", "context_window", "max_context_length")
"""The names that servers give a model's context."""


async def read_model(http: HttpClient, name: str) -> RemoteModel:
    """Return the model that the server has under `name`, or its only one. Raises `OSError`,
    `WorkerFailed` if it does not answer as it should, `Overloaded` for 429, `NotFound` if it has no
    list of models, or none yet, and `ConfigError` for another name."""
    answer = await http.send("GET", "/v1/models")
    if answer.status in {401, 403}:
        raise ConfigError(f"{http.url} refuses the key ({answer.status})", hint=KEY_HINT)
    if 300 <= answer.status < 400 or answer.status in {404, 405}:
        raise (NotFound if answer.status == 404 else ConfigError)(
            f"{http.url} is no OpenAI API: {http.url}/v1/models answers {answer.status}",
            hint="give the URL that is followed by /v1/models at the server",
        )
    if answer.status == 429:
        raise Overloaded(f"{http.url}/v1/models answers 429")
    if answer.status != 200:
        raise WorkerFailed(f"{http.url}/v1/models answers {answer.status}: {excerpt(answer.body)}")
    models = _read_models(answer.body)
    if models is None:
        text = f"{http.url}/v1/models is no list of models: {excerpt(answer.body)}"
        raise WorkerFailed(text)
    if not models:
        raise WorkerFailed(f"{http.url} serves no model at present")
    if not name:
        own = {model.root or model.id for model in models}
        if len(own) == 1:
            return models[0]
    for model in models:
        if model.id == name:
            return model
    names = [model.id for model in models]
    text = f"{http.url} has no model {name!r}" if name else f"{http.url} has several models"
    raise ConfigError(text, hint=f"--url-model: {nearest_name_hint(name, names)}")


def _read_models(body: bytes) -> list[RemoteModel] | None:
    """Return the entries of a list of models that have a name. None: the body is no such list."""
    try:
        value = decode_value(body)
    except ValueError:
        return None
    entries = value.get("data") if isinstance(value, dict) else value
    if not isinstance(entries, list):
        return None
    return [
        RemoteModel(
            name,
            read_word(entry.get("owned_by")),
            read_word(entry.get("root")),
            next(filter(None, (read_count(entry.get(key)) for key in CONTEXT_NAMES)), 0),
        )
        for entry in read_objects(entries)
        if (name := read_word(entry.get("id")))
    ]


async def read_facts(http: HttpClient, name: str) -> ServerFacts:
    """Ask the server what it is. Raises as `read_model`."""
    model = await read_model(http, name)
    kind = OWNERS.get(model.owned_by, "openai")
    if kind == "openai" and await _get(http, "/get_server_info"):
        kind = "sglang"
    if kind in {"openai", "llamacpp"} and (props := await _get(http, "/props")):
        settings = props.get("default_generation_settings")
        if context_tokens := read_count(read_object(settings).get("n_ctx")):
            slots = min(read_count(props.get("total_slots")) or 0, MAX_SLOTS)
            return ServerFacts("llamacpp", model, context_tokens, slots)
    return ServerFacts(kind, model, model.context_tokens)


async def check_tokenizer(http: HttpClient, facts: ServerFacts, ids: Sequence[int]) -> bool:
    """Compare the server's ids of `PROBE_TEXT` with ours. False: it does not tokenise. Raises
    `ModelUnavailable` if it has another model."""
    if facts.kind == "llamacpp":
        body: dict[str, Any] = {"content": PROBE_TEXT, "parse_special": True}
    else:
        body = {"model": facts.model.id, "prompt": PROBE_TEXT, "add_special_tokens": False}
    answer = await http.send("POST", "/tokenize", msgspec.json.encode(body))
    tokens = _as_dict(answer).get("tokens")
    if not isinstance(tokens, list):
        return False
    if tokens != [*ids]:
        raise ModelUnavailable(
            f"{http.url} serves {facts.model.id}, whose tokenizer is not that of the model given "
            "here",
            hint="name the model that the server has, after its URL",
        )
    return True


async def _get(http: HttpClient, path: str) -> Mapping[str, Any]:
    """Return the JSON object at a path that other servers do not have, or {}."""
    return _as_dict(await http.send("GET", path))


def _as_dict(answer: HttpAnswer) -> Mapping[str, Any]:
    try:
        return read_object(decode_value(answer.body)) if answer.status == 200 else {}
    except ValueError:
        return {}
