"""Pure tensor functions: log-probabilities, entropy, losses."""
