"""Samples: their order, how steps divide them over ranks, and how they are read and copied to the device."""
