"""The commands of this package: `syncline bench`, `syncline doctor`, `syncline report`, `syncline run`."""
