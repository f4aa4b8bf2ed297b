"""Explanation rules as data."""
