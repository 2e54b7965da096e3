"""Mixed precision for functions as they are: `autocast`."""
