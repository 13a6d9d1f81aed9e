"""From logits to what a step asks for: changed logits, what a grammar leaves, a token, logprobs."""
