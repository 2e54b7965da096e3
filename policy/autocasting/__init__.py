"""Automatic mixed precision for unmodified functions: `autocast`."""
