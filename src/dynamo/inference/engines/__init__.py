"""Foreign engines: which versions are supported, and the arguments that settings become."""
