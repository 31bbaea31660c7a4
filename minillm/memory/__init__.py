"""Axis 2: where KV lives.

block_pool.py   blocks held by reference count                                              chapter 00, 02
kv_manager.py   block tables of requests; contiguous KV is one block a request              chapter 00, 02
kv_cache.py     the bytes: one arena, a view for each layer                                 chapter 00
prefix_tree.py  RadixAttention's tree over tokens alone, to read                          chapter 05
prefix_cache.py  what prefix caches share: a tree, locks, eviction of idle leaves            chapter 05
radix_cache.py  RadixAttention: a radix tree over tokens                                    chapter 05
block_hash.py   full blocks found by the hash of all tokens up to their end                 chapter 05
"""
