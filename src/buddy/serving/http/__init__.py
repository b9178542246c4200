"""The face of the server: OpenAI's requests and replies, keys, limits, the page.

Entry: `app.py` has the routes, `server.py` listens. A body (`schema.py`) becomes requests
(`asking.py`, `prompts.py`, `budget_rules.py`), their events wait in a `mailbox.py`, and
`replies.py` writes them. `guards.py`, `auth.py` and `logs.py` are the middleware, `refusals.py`
every error.
"""
