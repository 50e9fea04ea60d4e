"""Benchmarks of whole training steps; see README.md."""
