"""Learning one task after another: what is kept of the first ones, by several methods, compared fairly."""
