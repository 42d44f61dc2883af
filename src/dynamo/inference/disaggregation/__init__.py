"""Prompts that one worker computes for another: both ends in engines, and the call between."""
