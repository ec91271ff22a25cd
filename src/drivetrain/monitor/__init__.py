"""Monitors a run."""
