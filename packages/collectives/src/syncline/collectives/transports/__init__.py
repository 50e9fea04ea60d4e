"""The backends that come with syncline-collectives. `startup.registry` imports each backend by its name."""
