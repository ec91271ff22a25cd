"""Values and errors that every other room may use. Imports nothing of drivetrain's own."""
