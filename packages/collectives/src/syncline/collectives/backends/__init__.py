"""The backends that come with syncline-collectives. Nothing imports them but the registry, by name."""
