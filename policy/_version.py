"""The version of the distribution `mpmodules`, which both packages come with."""

__version__ = "0.1.0"
