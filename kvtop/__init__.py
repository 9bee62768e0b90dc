"""kvtop: an operations console for paged KV caches. Importing it loads nothing but this line."""

__version__ = "0.1.0"
