"""What the front door costs, with the engines replaced by workers that answer at once."""
