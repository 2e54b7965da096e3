"""Which policy is in force, and the casts that it asks for."""
