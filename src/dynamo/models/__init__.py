"""Model cards, files, download, and the readers of tokenizers, templates and weights."""
