"""Engines over the network: their metrics pages and their streams of cache events."""
