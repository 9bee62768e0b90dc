"""Recordings: a run on disk, record by record, and how it is read again."""
