"""One OpenTelemetry trace for each request, derived from its timeline after it ended."""
