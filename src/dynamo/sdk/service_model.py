"""Services that answer as a model: how they tell frontends so."""

from __future__ import annotations

from typing import Any, Self
from urllib.parse import quote

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.sdk.decorators import role_of, spec_of
from dynamo.sdk.graph import walk

CHAT_ENDPOINT = "chat"


class ServiceModelRecord(msgspec.Struct, frozen=True):
    """`model` is answered by the endpoint of that component; `streams`: piece by piece;
    `derived`: with the help of models that are served otherwise."""

    model: str
    namespace: str
    component: str
    endpoint: str
    streams: bool
    derived: bool

    @classmethod
    def from_service(cls, service: type[Any], namespace: str) -> Self:
        """What a service with a model offers. Raises `ConfigError` where it has no `chat`."""
        spec = spec_of(service)
        chat = spec.endpoints.get(CHAT_ENDPOINT)
        if chat is None:
            raise ConfigError(
                f"{spec.name} is to answer as model {spec.model!r} and has no endpoint {CHAT_ENDPOINT!r}",
                hint="write `@dynamo_endpoint()` above `async def chat(self, request)`",
            )
        derived = any(role_of(one) for one in walk(service))
        return cls(spec.model, namespace, spec.name, chat.name, chat.streams, derived)


def service_models_prefix(namespace: str) -> str:
    """Below it stands `{model}/{instance}` for every instance that offers a model."""
    return f"/{namespace}/offers/"


def service_model_key(namespace: str, model: str, instance: str) -> str:
    """Where one instance's offer stands; a slash in the model's name is %2F."""
    return f"{service_models_prefix(namespace)}{quote(model, safe='')}/{instance}"
