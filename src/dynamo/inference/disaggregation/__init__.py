"""Prompts that one worker computes for another: the call between them, both ends of it."""
