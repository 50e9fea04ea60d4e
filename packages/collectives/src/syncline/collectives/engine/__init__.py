"""The engine runs the calls of a group one after the other, with time limits, over any transport."""
