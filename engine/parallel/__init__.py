"""How a model is spread over ranks: meshes, tensor and context parallelism, FSDP2."""
