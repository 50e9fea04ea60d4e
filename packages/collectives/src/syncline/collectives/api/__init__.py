"""The functions that scripts call: they make the default group and use it."""
