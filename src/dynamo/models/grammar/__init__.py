"""Grammars of answers: JSON schemas, regular expressions and call formats, by llguidance."""
