"""A connection: uvicorn's protocol, bounded in memory and in time."""
