"""The configurator: how a model would run on GPUs that are not there yet."""
