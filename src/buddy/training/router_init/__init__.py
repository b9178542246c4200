"""What a router starts from."""
