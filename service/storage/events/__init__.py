"""Log of events, and its receivers."""
