"""Panels: what each panel of the console says, as plain values: drawn by the screen, printed as lines, exported."""
