"""Starting processes, here and elsewhere, watching them, and saying why they ended. Without torch."""
