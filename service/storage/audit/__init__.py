"""Audit log: one hash chain per gallery, stored in SQL."""
