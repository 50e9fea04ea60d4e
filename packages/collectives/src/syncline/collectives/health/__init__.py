"""Find out what went wrong, and on which rank. The modules record, compare and watch calls, and write reports."""
