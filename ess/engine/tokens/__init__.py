"""From logits to tokens: sampling, verification, grammars, stops."""
