"""The server's open requests: a mailbox and a record of each."""
