"""Measures: sweeps, records, statistics."""
