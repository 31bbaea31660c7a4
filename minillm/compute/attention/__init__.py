"""Attention over cached K and V.

base.py    what a step tells attention (metadata) and what a backend answers (o, logsumexp)
naive.py   the whole score matrix, request by request                                     chapter 00
online.py  online softmax: empty state, update, merge, finish                             chapter 01
flash.py   FlashAttention to read, both loop orders, traffic counted                      chapter 01
flash_backend.py  the engine's FlashAttention: Triton kernel or torch twin                chapter 01
paged.py   the engine's PagedAttention: Triton kernel, or gather and torch's attention    chapter 02
dense.py   whole sequences without a cache, differentiable: training
"""
