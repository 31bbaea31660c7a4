"""Small training loops.

corpus.py     public-domain text from Debian's packages
embedded.py   trains tiny and tiny-draft
card.py       their cards
"""
