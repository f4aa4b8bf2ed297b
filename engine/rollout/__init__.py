"""Rollout engines: what generates with the trainer's weights, ours or a server of another make."""
