"""Predict how long a traced step would take on other numbers of ranks. This is a model, not a measurement."""
