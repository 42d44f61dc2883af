"""Calls to instances: client, load balancing, streams, failure detection."""
