"""Axis 3: who runs next.

scheduler.py   num_computed_tokens chasing num_tokens; forms batches, takes in their results   chapter 00
policies.py    who may join a batch: static batching                                           chapter 00
"""
