"""The Grafana board: described in `board`, kept as twophase.json for people to import."""
