"""What happened to a request, when and where, on one clock; pure."""
