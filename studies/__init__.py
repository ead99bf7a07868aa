"""Studies: what was trained and measured, and the road to the paper's tables (``paper``)."""
