"""Care of a deployment: what is wrong with this machine."""
