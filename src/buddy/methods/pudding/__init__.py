"""PuDDing: the search of its sets, the targets of its classifier, and the fit."""
