"""What is wrong, and with whom: agreement of the ranks, the record of calls, the monitor, reports."""
