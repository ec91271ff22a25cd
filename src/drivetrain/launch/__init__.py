"""Starts processes, here and on other machines, watches them, and explains why they ended. Does not need torch."""
