"""Engines behind the OpenAI API of another server, by its URL."""
