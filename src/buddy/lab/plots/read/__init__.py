"""What figures read from records."""
