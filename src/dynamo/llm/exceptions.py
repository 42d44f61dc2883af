"""Errors that handlers raise, under the import path of NVIDIA Dynamo."""

from dynamo.runtime.compatibility.errors import HttpError  # noqa: F401 - the name that programs import
