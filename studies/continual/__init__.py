"""Learns one task after another, and compares fairly how much several methods keep of the first ones."""
