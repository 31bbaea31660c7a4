"""The nouns: plain data that every room shares. No torch in here.

config.py           EngineConfig: engine arguments, one switch a paper, at_chapter(n)      chapter 00
sampling_params.py  SamplingParams                                                         chapter 00
request.py          Request: a sequence on its way through the engine                      chapter 00
batch.py            ScheduledBatch and ModelOutput: what scheduler and runner tell each other
outputs.py          RequestOutput, CompletionOutput: what a caller gets
chapters.py         which file came with which chapter
parts.py            which parts of the engine labs ask for, and a learner's own from work/mine
metrics.py          counters of an engine
model_config.py     ModelConfig: a model's shape, read from config.json
kv_spec.py          what a layer keeps of each token
cost.py             modelled bytes, operations and time of a forward pass
presets.py          well-known models and GPUs, for the cost model
workloads.py        seeded sets of requests
store.py            the folder for what is fetched or built
traces.py           readers of public traces                                               chapter 05
"""
