"""What is remembered of a group's calls, whether the ranks made the same ones, and what is written when one fails."""
