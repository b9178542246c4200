"""The search of the best sets: exchanges against losses."""
