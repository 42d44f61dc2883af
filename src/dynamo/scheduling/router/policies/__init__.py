"""Policies: each chooses a worker for a request; `router.mode` names it."""
