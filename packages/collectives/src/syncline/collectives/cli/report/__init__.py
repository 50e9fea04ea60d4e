"""`syncline report FOLDER`: shows what the ranks of a job have left in a folder, by readers that packages offer."""
