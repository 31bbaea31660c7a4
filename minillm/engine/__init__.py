"""The loop every request goes round.

engine.py            add_request, step, abort; refusals, failures, counters               chapter 00
runner.py            ScheduledBatch -> tensors -> model -> ModelOutput                    chapter 00
executor.py          where a batch is run                                                 chapter 00
output_processor.py  token ids -> text, stop strings, samples gathered by prompt          chapter 00
structured.py        grammars: which tokens may come next, which must                     chapter 05
"""
