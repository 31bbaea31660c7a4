"""From logits to tokens.

processors.py   logits -> logits: masks, bias, penalties; then logits -> probabilities: temperature, min-p, top-k, top-p
draws.py        uniform numbers that depend on the request alone
sampler.py      one token for each row, and its log-probabilities
"""
