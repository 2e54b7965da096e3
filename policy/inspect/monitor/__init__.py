"""A train step that returns statistics of its arrays."""
