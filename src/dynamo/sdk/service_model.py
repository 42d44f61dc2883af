"""Records of models that user services offer. Frontends read them from discovery."""

from __future__ import annotations

from typing import Any, Self
from urllib.parse import quote

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.sdk.decorators import role_of, spec_of
from dynamo.sdk.graph import walk

CHAT_ENDPOINT = "chat"


class ServiceModelRecord(msgspec.Struct, frozen=True):
    """The endpoint that answers as `model`. `streams`: the answer comes piece by piece.

    `derived`: the service uses models of Dynamo's own services.
    """

    model: str
    namespace: str
    component: str
    endpoint: str
    streams: bool
    derived: bool

    @classmethod
    def from_service(cls, service: type[Any], namespace: str) -> Self:
        """Return the record of a service. Raises `ConfigError` if it has no endpoint `chat`."""
        spec = spec_of(service)
        chat = spec.endpoints.get(CHAT_ENDPOINT)
        if chat is None:
            raise ConfigError(
                f"{spec.name} offers model {spec.model!r} without an endpoint {CHAT_ENDPOINT!r}",
                hint="write `@dynamo_endpoint()` above `async def chat(self, request)`",
            )
        derived = any(role_of(other) for other in walk(service))
        return cls(spec.model, namespace, spec.name, chat.name, chat.streams, derived)


def service_models_prefix(namespace: str) -> str:
    """Return the discovery prefix of the keys `{model}/{instance}` of all records."""
    return f"/{namespace}/offers/"


def service_model_key(namespace: str, model: str, instance: str) -> str:
    """Return the discovery key of an instance's record. A slash in the model's name becomes %2F."""
    return f"{service_models_prefix(namespace)}{quote(model, safe='')}/{instance}"
