"""Replay of a trace on a simulated cluster: the real router, engines and caches in virtual time."""
