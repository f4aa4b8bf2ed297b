"""Renders records and findings; measures nothing, decides nothing."""
