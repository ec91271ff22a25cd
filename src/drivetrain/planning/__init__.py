"""Measures on the user's own model, and makes the plan of a run."""
