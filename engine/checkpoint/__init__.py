"""Checkpoints: weights and training state on disk, written whole or not at all, and read back."""
