"""The stories of requests: published by the processes that serve them, kept by the observer."""
