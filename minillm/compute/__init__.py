"""Axis 1: less traffic for the same arithmetic.

attention/   backends over the KV cache                                                    chapter 00, 01
sampling/    from logits to tokens                                                         chapter 00
"""
