"""From padded batches to balanced, packed micro-batches and back."""
