"""Measurements: counters first, times as ratios within one run.

workload.py     runs a workload on an engine
scoreboard.py   the scoreboard: one workload, every chapter's engine
against.py      the same batches on a peer, interleaved
paging.py       a decode step over paged and over contiguous KV                  chapter 02
gpu.py          the one GPU script: kernels, tokens, throughput
machine.py      what a figure was measured on
doctor.py       what this machine has for the course
"""
