"""Which model a service means."""

from __future__ import annotations

from dynamo.application import Gateway, Served
from dynamo.application.gateway import DEFAULT
from dynamo.core.errors import NotReady

MODELS = "models"
"""The health reason of a frontend that has none yet."""


def plain_model(gateway: Gateway, name: str | None) -> tuple[str, Served]:
    """A model that workers serve: the one of that name; the first one where there is no name, or
    the name is that of a service (whose request was passed on as it was). Raises `ModelNotFound`,
    `NotReady`."""
    shown, served = gateway.find(name or DEFAULT)
    if served.derived:
        shown, served = gateway.find(DEFAULT)
    if served.derived:
        raise NotReady("no model is ready yet that is not made of others", retry_after_s=1.0)
    return shown, served
