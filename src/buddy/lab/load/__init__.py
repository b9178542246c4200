"""Load tests of a chat endpoint."""
