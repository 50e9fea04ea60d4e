"""`syncline report FOLDER` shows files that the ranks of a job wrote, by readers of installed packages."""
