"""Models: location, download, metadata, tokenizers, chat templates and weights."""
