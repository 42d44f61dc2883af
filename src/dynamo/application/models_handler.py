"""The route /v1/models."""

from __future__ import annotations

import msgspec

from dynamo.application.exchange import Exchange
from dynamo.application.gateway import Gateway, ServedModel


class ModelBody(msgspec.Struct, frozen=True):
    """OpenAI's model object, plus vLLM's `root` and `max_model_len`."""

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    object: str = "model"


class ModelsHandler:
    """Lists served models. Each alias is listed as a model whose `root` is the model's id."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def list_models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        self._gateway.require_ready()
        data = [_model_body(name, served) for name, served in self._gateway.models.items()]
        exchange.send_json(200, msgspec.json.encode({"object": "list", "data": data}))

    async def get_model(self, exchange: Exchange) -> None:
        """GET /v1/models/{id}; an id may contain slashes."""
        name = exchange.request.path.removeprefix("/v1/models/")
        name, served = self._gateway.find(name)
        exchange.send_json(200, msgspec.json.encode(_model_body(name, served)))


def _model_body(name: str, served: ServedModel) -> ModelBody:
    return ModelBody(name, served.created, served.owned_by, served.names[0], served.context_tokens)
