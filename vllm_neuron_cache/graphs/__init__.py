"""The compiled graphs: one definition each, in PyTorch, lowered by the lanes in `graphs.lanes`."""
