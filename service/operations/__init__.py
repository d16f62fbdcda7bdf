"""Work beside requests: housekeeping, webhooks, shadow searches, metrics, readiness."""
