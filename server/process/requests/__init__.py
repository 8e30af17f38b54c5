"""What a server has of its open requests: a mailbox for each, and a record of each."""
