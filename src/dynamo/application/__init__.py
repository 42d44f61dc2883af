"""The OpenAI API over HTTP: routes, checked bodies, limits, JSON answers and event streams."""

from dynamo.application.app import Application
from dynamo.application.gateway import Gateway, ServedModel

__all__ = ["Application", "Gateway", "ServedModel"]
