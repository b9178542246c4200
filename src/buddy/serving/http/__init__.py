"""The server's face: routes, requests and replies in OpenAI's shapes, keys, and the page."""
