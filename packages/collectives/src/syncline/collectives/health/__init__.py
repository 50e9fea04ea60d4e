"""Finds what is wrong, and on which rank: compares the calls of ranks, records them, watches them, and writes reports."""
