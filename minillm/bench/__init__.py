"""Measurements: counters first, times as ratios within one run.

workload.py     runs a workload on an engine
scoreboard.py   the scoreboard: one workload, every chapter's engine
against.py      the same batches on a peer, interleaved
paging.py       a decode step over paged and over contiguous KV                  chapter 02
stalls.py       gaps of running requests while long prompts come, whole or in chunks  chapter 04
sharing.py      requests that begin alike, with and without a prefix cache       chapter 05
gpu.py          the one GPU script: kernels, tokens, throughput
machine.py      what a figure was measured on
doctor.py       what this machine has for the course
"""
