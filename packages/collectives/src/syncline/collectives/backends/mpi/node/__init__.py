"""What ranks do that share a node: memory, meeting places, and the ways that collectives take there."""
