"""The version, in a file that all others may import."""

__version__ = "0.1.0"
