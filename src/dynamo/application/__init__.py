"""The OpenAI API: bodies checked, routes, admission, answers in text and server-sent events."""

from dynamo.application.app import Application
from dynamo.application.gateway import Gateway, ServedModel, TextProcessor

__all__ = ["Application", "Gateway", "ServedModel", "TextProcessor"]
