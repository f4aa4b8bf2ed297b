"""Typed configuration; imports neither torch nor anything above it."""
