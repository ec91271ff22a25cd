"""The functions that users call: train, drive, evaluate, plan, benchmark."""
