"""Alerts: one table of rules, and their evaluation, notifications and Prometheus form."""
