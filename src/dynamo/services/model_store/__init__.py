"""The model store: pieces of models between processes, and one fetch from their source."""
