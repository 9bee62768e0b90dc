"""Pictures of recorded runs, still and moving, and a page that reports on one. They load nothing."""
