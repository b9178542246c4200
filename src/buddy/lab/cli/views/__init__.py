"""What the lab's commands show."""
