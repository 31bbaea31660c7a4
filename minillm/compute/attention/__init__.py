"""Attention over cached K and V.

base.py    what a step tells attention (metadata) and what a backend answers (o, logsumexp)
naive.py   the whole score matrix, request by request                                     chapter 00
dense.py   whole sequences without a cache, differentiable: training
"""
