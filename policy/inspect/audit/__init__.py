"""The dtypes that a program runs in, and the numerical hazards in it."""
