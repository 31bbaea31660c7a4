"""Axis 2: where KV lives.

block_pool.py   blocks held by reference count                                              chapter 00, 02
kv_manager.py   block tables of requests; contiguous KV is one block a request              chapter 00, 02
kv_cache.py     the bytes: one arena, a view for each layer                                 chapter 00
"""
