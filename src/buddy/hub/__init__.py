"""What finds, fetches and loads models."""
