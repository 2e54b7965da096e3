"""Parameters stored in 8 and 4 bits."""
