"""Tokenizers: encoders, their verification, and caches of encoded text."""
