"""Tensors as the arguments of collectives: checks, layout in memory, packing, and reductions on the host."""
