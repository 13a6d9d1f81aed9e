"""Sections of a cluster's YAML, with defaults and limits; `core.config` puts them together."""
