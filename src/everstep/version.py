"""The version of everstep; any room may ask for it, as it imports nothing."""

__version__ = "0.1.0"
