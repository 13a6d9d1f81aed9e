"""The commands of `twophase`: each module is one, or a few that show the same thing."""
