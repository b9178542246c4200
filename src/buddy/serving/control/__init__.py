"""Control: how deep rows run, how much prompt a pass feeds, and who is let in.

Entry: `protocol.py`, what the engine's thread asks and tells. `controller.py` answers it, from
predictions (`cost.py`), from what came late (`trim.py`) and for who waits (`admission.py`);
`metrics.py` counts.
"""
