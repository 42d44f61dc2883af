"""The workers of a model, and the requests that are at them."""
