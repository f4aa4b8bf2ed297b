"""The FSDP2 training engine. It has never heard of benchmarks."""
