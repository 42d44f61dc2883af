"""The script engine: recorded output instead of a model."""
