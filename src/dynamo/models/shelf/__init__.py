"""The shelf: fetched models on this machine, whole or in part, checked by hash."""
