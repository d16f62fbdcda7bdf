"""Outbox of events, webhooks and deliveries."""
