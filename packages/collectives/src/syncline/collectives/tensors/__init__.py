"""Tensors in memory: layout, checks, packing, and reductions on the host."""
