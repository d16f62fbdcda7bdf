"""Erasure, retention, subject access, backups and key rotation."""
