"""Which model a service means."""

from __future__ import annotations

from dynamo.application import Gateway, ServedModel
from dynamo.application.gateway import DEFAULT_MODEL
from dynamo.core.errors import ModelNotReady

MODELS_HEALTH_KEY = "models"
"""The health reason of a frontend that has none yet."""


def find_worker_model(gateway: Gateway, name: str | None) -> tuple[str, ServedModel]:
    """A model that workers serve: the one of that name; the first one where there is no name, or
    the name is that of a service (whose request was passed on as it was). Raises `ModelNotFound`,
    `NotReady`."""
    shown, served = gateway.find(name or DEFAULT_MODEL)
    if served.derived:
        shown, served = gateway.find(DEFAULT_MODEL)
    if served.derived:
        raise ModelNotReady("no model is ready yet that is not made of others", retry_after_s=1.0)
    return shown, served
