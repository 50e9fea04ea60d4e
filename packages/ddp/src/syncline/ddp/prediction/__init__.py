"""Predict how long a traced step would take on other numbers of ranks. The result is computed by a model, not measured."""
