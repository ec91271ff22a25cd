"""Faults that are injected by name, and what a run does about them."""
