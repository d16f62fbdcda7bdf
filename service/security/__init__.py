"""Who may do what, what is written down of it, and how what is stored is sealed."""
