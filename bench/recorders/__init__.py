"""Samplers of device, host and allocator state."""
