"""minillm: fifteen papers, one engine.

The rooms, in the order they import each other (each ``__init__`` lists its files):
cli, course, bench, serving, llm and programs, simulator and training, engine, scheduling, memory, models, parallel,
compute, kernels, core.

programs.py   a language of calls: gen, select, fork, join (SGLang's front end)      chapter 05
"""

from importlib import import_module

# Looked up when first used: the scheduler and the simulator are imported without torch.
_PUBLIC = {
    "LLM": "minillm.llm",
    "Engine": "minillm.engine.engine",
    "EngineConfig": "minillm.core.config",
    "SamplingParams": "minillm.core.sampling_params",
    "StructuredOutputsParams": "minillm.core.sampling_params",
    "RequestOutput": "minillm.core.outputs",
    "CompletionOutput": "minillm.core.outputs",
    "function": "minillm.programs",
    "gen": "minillm.programs",
    "select": "minillm.programs",
    "run_programs": "minillm.programs",
}
__all__ = list(_PUBLIC)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
