"""Models' own code under a policy, written as for float32: its matmuls, its sums and its error."""
