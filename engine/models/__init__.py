"""What is known of model families, and how models are found, built and headed."""
