"""The observer of a deployment: stages, causes, explanations and history of its requests."""
