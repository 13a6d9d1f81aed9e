"""What telemetry costs decode.

__main__  steps with and without it, one beside the other, and the report
direct    the code that records, timed alone
"""
