"""Values and errors that every other room may use. Imports nothing of drivetrain's own."""

# Built with mimalloc, as for Arm, torch gives free memory back to the system after 10 ms, and gets it anew page by page
# in the next step: 7 to 11 % of a step on a CPU. It is read once, when torch is loaded. Other builds do not read it.
MEMORY_KEPT = {"MIMALLOC_PURGE_DELAY": "1000"}  # ms
