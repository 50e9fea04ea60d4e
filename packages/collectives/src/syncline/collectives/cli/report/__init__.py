"""`syncline report FOLDER` shows files that the ranks of a job wrote. Installed packages provide readers for such files."""
