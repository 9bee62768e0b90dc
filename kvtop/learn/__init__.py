"""Lessons: paging taught on an engine of its own. The files, their checks, who plays them; nothing is drawn here."""
