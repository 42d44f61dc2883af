"""Calibration: the timing of an engine by what its requests have measured."""
