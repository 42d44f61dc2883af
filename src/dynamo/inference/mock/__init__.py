"""An engine without weights: real scheduling, cache and events, modelled time."""
