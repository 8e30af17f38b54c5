"""What a server writes to its log: records as text or JSON, through a pipe that never blocks it."""
