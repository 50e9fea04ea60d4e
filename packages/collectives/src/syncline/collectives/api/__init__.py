"""What scripts call: the default group, and functions that use it."""
