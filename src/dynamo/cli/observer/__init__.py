"""Commands that read from a deployment's observer."""
