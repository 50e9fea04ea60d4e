"""Collectives of ranks that share a node: shared memory, barriers in it, and the algorithms that use them."""
