"""Optimizers over sharded parameters, schedules and gradient clipping."""
