"""Access control, rate limits, master keys and encryption of stored values."""
