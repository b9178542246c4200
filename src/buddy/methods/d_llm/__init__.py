"""D-LLM: gates for each token, trained beside the model."""
