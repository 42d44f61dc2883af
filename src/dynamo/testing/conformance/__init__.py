"""Conformance tests of engines."""
