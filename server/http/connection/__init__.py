"""uvicorn's protocol for a connection, with bounds on memory and time."""
