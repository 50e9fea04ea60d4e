"""Find out which rank this process is, which backend connects it, and where the ranks meet."""
