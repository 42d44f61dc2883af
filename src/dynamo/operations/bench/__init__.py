"""Measure an OpenAI-compatible server from outside: load, latencies, throughput, goodput."""
