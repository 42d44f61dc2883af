"""Benchmark of an OpenAI-compatible server: load, latencies, throughput and goodput."""
