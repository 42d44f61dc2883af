"""The command line: each command parses its flags, loads settings and calls one function."""

from dynamo.cli.entry import main

__all__ = ["main"]
