"""What knows the anatomy of Hugging Face models."""
