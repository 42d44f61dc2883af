"""Parts of the life of a request in an engine, beside its steps."""
