"""An OpenAI-compatible server in which every request may say how much compute it is worth."""
