"""The front door: gives each request to a pair of workers and streams the answer back."""
