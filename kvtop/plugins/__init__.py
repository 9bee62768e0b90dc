"""Plugins: what publishes another engine's block pool out of its own process. Each engine has a module of its own.

An engine loads its plugin in every one of its processes, so that importing one costs next to nothing; all else is
imported once ``KVTOP_PUBLISH`` is set and the engine has made its pool. Whatever goes wrong here ends the
publication and never the engine.
"""
