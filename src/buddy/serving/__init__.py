"""An OpenAI-compatible server in which every request may say how much compute it is worth.

A request passes three rooms, which have two files in common:

- `request.py`: the shared nouns, what a client asks and what comes back token by token;
- `client.py`: the seam, `EngineClient`: how HTTP asks whatever engine is behind it;
- `http/`: bodies become requests, events become replies; entry `http/app.py`;
- `rows/`: continuous batching in a thread; entry `rows/engine.py`, the client of a thread;
- `control/`: how deep rows run and who is let in; entry `control/protocol.py`.

`start.py` joins the last two for `buddy serve`. Neither of `http` and `rows` imports the other.
"""
