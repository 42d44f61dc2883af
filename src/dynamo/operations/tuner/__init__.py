"""The tuner: tries other settings on recorded requests, then on one process, with a way back."""
