"""Who says how deep rows run and who is let in."""
