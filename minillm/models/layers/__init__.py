"""Layers shared by every model family.

activation.py   silu(gate) · up
linear.py   Linear and LinearMethod: create, load a shard, process after loading, apply (chapters 07, 09, 13)
norm.py     RMSNorm
rotary.py   rotary embedding with its scalings
"""
