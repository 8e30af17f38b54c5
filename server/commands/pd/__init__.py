"""`ess serve --pd`: prefill and decode workers on this machine, a stock router before them."""
