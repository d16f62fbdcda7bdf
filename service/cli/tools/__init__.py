"""Code behind commands that is slow to import or useful without the command line."""
