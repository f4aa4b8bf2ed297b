"""Spans of a training step and their export."""
