"""What finds, fetches and loads base models."""
