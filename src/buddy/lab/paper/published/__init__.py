"""The figures that the paper reports, as CSV."""
