"""Find what is wrong, and on which rank: agreement of the ranks, the record of calls, the monitor, reports."""
