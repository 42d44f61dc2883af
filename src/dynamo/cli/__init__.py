"""Commands: parse, load settings, call one function."""

from dynamo.cli.entry import main

__all__ = ["main"]
