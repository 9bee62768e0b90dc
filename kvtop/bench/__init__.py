"""Benchmarks of the allocator on this machine."""
