"""How much device memory a training step will take, said without a GPU."""
