"""The backends that come with syncline-collectives. The registry imports them by name."""
