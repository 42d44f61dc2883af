"""Conformance tests of the planes and engines, one suite per interface.

A backend's test module subclasses a suite and defines the fixture `join`: a coroutine function that
opens one more plane of the test's own network. Each plane stands for one process.
"""
