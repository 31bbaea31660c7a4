"""Model families and how their checkpoints are found, fetched and read.

llama.py       Llama, SmolLM2, Mistral, Qwen2, Qwen3
layers/        linear (LinearMethod), norm, rotary
registry.py    architecture name -> class
loader.py      safetensors folders in and out
gguf.py        GGUF file -> folder
fetch.py       a model's name -> folder; minillm fetch
tokenizer.py   text <-> token ids, chat template, incremental detokenisation
"""
