"""Triton kernels, one file each, every one beside a torch twin of equal signature. The first comes with chapter 01."""
