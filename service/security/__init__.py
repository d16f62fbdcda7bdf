"""Access control, master keys and encryption of stored values."""
