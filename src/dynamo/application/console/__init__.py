"""The console: pages of an observer that show its deployment in a browser."""
