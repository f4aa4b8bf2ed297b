"""Preflight checks, each a function from facts to findings."""
