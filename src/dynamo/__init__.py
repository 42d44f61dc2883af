"""Dynamo in Python: distributed serving of large language models."""

__version__ = "0.1.0"
