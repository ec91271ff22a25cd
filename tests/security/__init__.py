"""What others may not do: run code, leave the folder, listen in, read secrets, forge lines."""
