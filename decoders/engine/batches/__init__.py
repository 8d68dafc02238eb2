"""How requests become rows: read, put together, decoded side by side, let go."""
