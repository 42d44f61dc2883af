"""The names that programs import from NVIDIA Dynamo's `dynamo.llm.exceptions`."""

from dynamo.llm import __getattr__  # noqa: F401 - serves every name
