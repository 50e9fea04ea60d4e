"""`syncline report FOLDER` shows the files that the ranks of a job wrote. Packages offer a reader for each kind of file."""
