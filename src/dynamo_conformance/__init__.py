"""Conformance tests of the planes and of engines, one suite per interface. The suites need pytest.

An author's test module subclasses a suite and defines a fixture: `engine`, a started engine, or
`join`, a coroutine function that opens one more plane of the test's own network. Each plane stands
for one process.
"""
