"""`syncline report FOLDER` shows files that the ranks of a job wrote. Installed packages bring readers for these files."""
