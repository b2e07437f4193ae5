"""Models: one decoder for four families, and the loader that fills it."""
