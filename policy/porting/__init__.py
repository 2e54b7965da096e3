"""Porting Flax code: imports from mpmodules, layers without the dtypes that were passed along."""
