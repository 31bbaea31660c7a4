"""Axis 3: who runs next.

scheduler.py   num_computed_tokens chasing num_tokens; forms batches, preempts, takes in results   chapter 00
policies.py    who may join a batch, who goes first: static batching, first come first served      chapter 00
iteration.py   requests join between any two passes; priorities, skip-join MLFQ                    chapter 03
orca.py        Orca's Algorithm 1 to read, batches as counters, the fairness invariant             chapter 03
sarathi.py     chunked prefill in stall-free batches, a token budget, Algorithm 3 to read          chapter 04
cache_aware.py  the longest cached prefix first                                                     chapter 05
"""
