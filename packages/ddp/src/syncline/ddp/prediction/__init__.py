"""Predicts how long a traced step would take on other numbers of ranks: a model, not a measurement."""
