"""What needs a cluster, or hours: a discrete-event model of the engine over core's cost model. No torch in here.

simulation.py    the real scheduler and block books; a pass takes modelled seconds                chapter 02
reservation.py   contiguous KV reserved ahead: PagedAttention's Orca (Max), (Pow2) and (Oracle)   chapter 02
timeline.py      who ran, waited or held a seat for nothing, pass by pass, to be drawn            chapter 03
prefixes.py      hit rates of prefix caches on prompts and traces, and the best possible          chapter 05
"""
