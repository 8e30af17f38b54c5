"""`ess serve --pd`: prefill and decode workers on this machine, behind a stock router."""
