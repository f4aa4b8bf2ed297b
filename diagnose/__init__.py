"""Checks configurations, explains failures."""
