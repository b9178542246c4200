"""Speed, and where the time goes."""
