"""Records and shows what a run does: its files, the terminal, trackers, the time of each phase, what holds it up."""
