"""Work beside requests: housekeeping, webhooks, metrics, readiness."""
